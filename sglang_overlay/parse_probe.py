"""Parse DDTREE's flags with the SGLang of this interpreter: a proof runs this text on a host, so it imports nothing of ours."""

import argparse

from sglang.srt.server_args import ServerArgs

parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
flags = "--model-path M --speculative-algorithm DDTREE --speculative-ddtree-topk 4 --speculative-ddtree-budget"
args = parser.parse_args([*flags.split(), "7"])
found = args.speculative_algorithm, args.speculative_ddtree_topk, args.speculative_ddtree_budget
if found != ("DDTREE", 4, 7):
    raise RuntimeError(f"SGLang understood DDTREE's flags as {found}")
