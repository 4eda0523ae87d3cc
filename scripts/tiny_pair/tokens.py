"""Make a tokenizer and a token stream of the tiny pair's text, and draw training windows from the stream."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from tiny_pair import corpus as text
from tiny_pair.training import log


def prepare(out: Path, roots: list[Path], vocab: int, limit_mb: float) -> None:
    """Write the tokenizer, the token stream with its document starts, and the held-out prompts."""
    corpus = text.collect(roots, limit_mb)
    log(len(corpus.train), "documents,", round(sum(map(len, corpus.train)) / 1e6, 1), "MB")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        corpus.train[::3],
        trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=list(text.SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    (out / "tokenizer").mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer/tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": text.SPECIAL[text.IM_END],
        "pad_token": text.SPECIAL[text.END_OF_TEXT],
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
        "chat_template": text.CHAT_TEMPLATE,
    }
    (out / "tokenizer/tokenizer_config.json").write_text(json.dumps(settings, indent=1))

    def stream(documents: list[str]) -> tuple[Tensor, Tensor]:
        ids: list[int] = []
        starts = []
        for i in range(0, len(documents), 256):
            for encoded in tokenizer.encode_batch(documents[i : i + 256]):
                starts.append(len(ids))
                ids += [*encoded.ids, text.END_OF_TEXT]
        return torch.tensor(ids, dtype=torch.int16), torch.tensor(starts)

    train, starts = stream(list(corpus.train))
    held, held_starts = stream([*corpus.held_out_code, *(text.chat(q, a) for q, a in corpus.held_out_chats)])
    torch.save({"train": train, "starts": starts, "held": held, "held_starts": held_starts}, out / "tokens.pt")
    openings = []
    for source in corpus.held_out_code:
        lines = source.splitlines()
        for at in (len(lines) // 3, 2 * len(lines) // 3):
            openings.append("\n".join(lines[at : at + 8]) + "\n")
    prompts = {
        "code": openings[:40],
        "chat": [q for q, _ in corpus.held_out_chats[:40]],
        "exercise": [q for q, _ in corpus.held_out_exercises[:40]],
    }
    (out / "prompts.json").write_text(json.dumps(prompts, indent=1))
    log(f"{len(train) / 1e6:.1f} M tokens, vocabulary {tokenizer.get_vocab_size()}, held out {len(held) / 1e6:.2f} M")


@dataclass(frozen=True)
class Stream:
    """A token stream and where its documents start."""

    ids: Tensor
    starts: Tensor

    def windows(self, count: int, length: int, at_starts: float) -> Tensor:
        """Draw windows [count, length], a share of them at document starts."""
        last = len(self.ids) - length
        anywhere = torch.randint(0, last, (count,), device=self.ids.device)
        first = self.starts[torch.randint(0, len(self.starts), (count,), device=self.ids.device)].clamp(max=last)
        begin = torch.where(torch.rand(count, device=self.ids.device) < at_starts, first, anywhere)
        return self.ids[begin[:, None] + torch.arange(length, device=self.ids.device)].long()

    def before_answers(self, count: int, length: int, marker: Tensor) -> Tensor:
        """Draw windows that end where an assistant's answer is about to start."""
        hits = (self.ids.unfold(0, len(marker), 1) == marker.to(self.ids)).all(1).nonzero()[:, 0] + len(marker)
        hits = hits[hits > length]
        end = hits[torch.randint(0, len(hits), (count,), device=self.ids.device)]
        return self.ids[end[:, None] - length + torch.arange(length, device=self.ids.device)].long()
