"""Servers on this host: started, watched, stopped. Sent only with the commands that need it; standard library only, Python 3.9."""

from ddtree_deploy.agent.serving import nccl, start, stop, survey, watch

READS = {"serve-look": watch.look, "serve-log": watch.log, "serve-request": watch.request, "serve-survey": survey.survey}
WRITES = {"serve-start": start.start, "serve-stop": stop.stop, "serve-proved": watch.proved, "serve-nccl": nccl.check}
