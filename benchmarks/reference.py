"""What transformers generates on the same weights: the answer key of the parity checks."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from benchmarks.workload import Job

CACHE = Path(__file__).parent / ".cache"


class Reference:
    """Greedy answers of transformers `generate`, one request at a time, kept in a file between runs."""

    def __init__(self, source: str) -> None:
        from packhorse.pack.load import load
        from packhorse.pack.source import resolve

        resolved = resolve(source)
        self._identity = resolved.weights_sha256()
        self._load = lambda: load(resolved, with_tokenizer=False).model
        self._model: Any = None

    @property
    def model(self) -> Any:
        """The transformers model, float32, loaded when it is first needed."""
        if self._model is None:
            self._model = self._load().eval()
            self._model.generation_config.eos_token_id = None  # the workload's lengths are given
        return self._model

    def answers(self, jobs: list[Job]) -> list[list[int]]:
        """Output ids of each job. The first time takes minutes; then they come from the cache."""
        import transformers

        key = json.dumps([self._identity, transformers.__version__, [(j.prompt, j.output_len) for j in jobs]])
        file = CACHE / f"answers-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        if not file.is_file():
            CACHE.mkdir(exist_ok=True)
            found = [self._generate(job) for job in jobs]
            file.write_text(json.dumps(found))
        answers: list[list[int]] = json.loads(file.read_text())
        return answers

    def _generate(self, job: Job) -> list[int]:
        import torch
        from transformers import GenerationConfig

        settings = GenerationConfig(do_sample=False, max_new_tokens=job.output_len, pad_token_id=0)
        with torch.inference_mode():
            ids = torch.tensor([job.prompt])
            output = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        answer: list[int] = output[0, len(job.prompt) :].tolist()
        return answer

    def top_two_gap(self, context: list[int]) -> float:
        """Difference of the two largest logits after `context`."""
        import torch

        with torch.inference_mode():
            top = self.model(torch.tensor([context]), logits_to_keep=1).logits[0, -1].topk(2).values
        return float(top[0] - top[1])
