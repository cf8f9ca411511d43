"""A student during training, and how far its run has come."""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

import configure
from configure import Config
from lib import metrics, parallel
from model import Qwen2
from run.identity import record_hash
from run.methods import compute_dtype

SINCE_LOG = ("since_log_tokens", "since_log_steps", "since_log_sec")  # since the last record
COUNTS = ("valid_tokens", *SINCE_LOG)


@dataclass
class Student:
    """One method's weights and optimizer, and what is logged about them."""

    name: str  # METHOD or METHOD@LABEL; also the name of the student's folder
    model: Qwen2
    extras: nn.ModuleDict  # for terms of your own: trained, in checkpoints, never in model/
    optimizer: torch.optim.Optimizer
    folder: Path
    init_sha256: str  # of the initial weights
    tokenizer: PreTrainedTokenizerFast | None = None  # saved with the model
    lr_factor: float = 1.0  # multiplies the schedule's learning rate
    sums: dict[str, Tensor] = field(default_factory=dict)  # fp64, by term, since the last record
    gnorm: float = 0.0  # gradient norm of the last update, before clipping
    skipped: int = 0  # updates in a row without a finite gradient
    stopped: str | None = None  # why the student cannot continue
    warned: bool = False  # whether this program has warned that its held-out CE rises
    services: dict[str, Callable] = field(default_factory=dict)  # TensorBoard, Weights & Biases
    evaluate_at: Callable | None = None  # (update, state) -> `evaluate` (run/methods.py)
    next_state: dict[str, Tensor] = field(default_factory=dict)  # fp64 sums over an update's labels

    @property
    def state(self) -> dict[str, Tensor]:
        """The state of the objective, which checkpoints hold as buffers of `extras`."""
        return dict(self.extras.state.named_buffers()) if "state" in self.extras else {}

    def parameters_by_name(self) -> dict[str, Tensor]:
        """Return the parameters of the model and of the extras by name."""
        extras = self.extras.named_parameters(prefix="extras")
        return dict(self.model.named_parameters()) | dict(extras)

    def totals(self) -> dict[str, float]:
        """Return `sums`, added up over all processes."""
        if not self.sums:
            return {}
        return dict(zip(self.sums, parallel.all_reduce_sum(*self.sums.values()), strict=True))

    def checkpoints(self) -> dict[int, Path]:
        """Return the complete checkpoints by step, oldest first."""
        complete = {}
        for path in self.folder.glob("checkpoints/step_*"):
            name = re.fullmatch(r"step_(\d{8,})", path.name)
            if name and path.is_dir():
                complete[int(name[1])] = path
        return dict(sorted(complete.items()))


@dataclass
class Run:
    """How far a run has come, and what is recorded about it."""

    cfg: Config
    facts: dict  # the provenance of every result (run/preflight.py)
    step: int = 0  # updates done so far
    counts: dict = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    first_step: int = 0  # at which this program started: 0, or that of a checkpoint
    began: float = 0.0  # `time.perf_counter()` when it started, later after its first update
    signals: list[str] = field(default_factory=list)  # names of those that ended the run early

    def count_update(self, n_valid: float, seconds: float):
        configure.PROGRESS["step"] = self.step
        self.counts["valid_tokens"] += n_valid
        self.counts["since_log_tokens"] += n_valid
        self.counts["since_log_steps"] += 1
        self.counts["since_log_sec"] += seconds


def n_validated(val, cfg) -> int:
    """Return the number of held-out rows that a validation reads."""
    return min(val.n, cfg.val_max_rows or val.n)


def hidden_and_head(s, cfg) -> metrics.Model:
    """Return the pair (hidden, head) that lib/metrics.py expects.

    Call inside `gathered_roots`; otherwise a sharded head is incomplete.
    """
    return functools.partial(s.model.hidden, dtype=compute_dtype(cfg)), s.model.head


def student_facts(s, run) -> dict:
    """Return the provenance of one student's weights and scores, and how far it has come."""
    cfg = run.cfg
    record = run.facts["made_by"][s.name]
    return {
        "method": s.name,
        "overrides": cfg.settings_of(s.name),
        "student": cfg.student,
        "seed": cfg.seed,
        "init_sha256": s.init_sha256,
        "step": run.step,
        "nominal_tokens": run.step * cfg.batch_rows * cfg.seq_len,
        **run.counts,
        **run.facts,
        "made_by": record,  # of this student alone; run.facts has those of all
        "made_by_sha256": record_hash(record),
    }
