"""A student during training, and how far its run has come."""

import contextlib
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from configure import Config
from lib import metrics, parallel
from losses import Method
from model import Qwen2
from run.provenance import record_hash


@dataclass(slots=True)
class Student:
    """One method's weights and optimizer, and what is logged about them.

    A module of your own, such as an average of the weights, goes into `extras` or is `scored`:
    checkpoints hold both.
    """

    name: str  # METHOD or METHOD@LABEL; also the name of the student's folder
    model: Qwen2  # or a `Foreign` (run/transformers_models.py)
    extras: nn.ModuleDict  # modules of the method: trained, in checkpoints, never in model/
    optimizers: list[torch.optim.Optimizer]  # each for some of the parameters
    folder: Path
    init_sha256: str  # of the initial weights
    method: Method  # with the settings of the config
    tokenizer: PreTrainedTokenizerFast | None  # saved with the model
    dtype: torch.dtype  # of activations and products
    scored: nn.Module | None = None  # is validated and saved, such as an average; None: `model`
    sums: dict[str, Tensor] = field(default_factory=Counter)  # fp64, by term, since the last entry
    gnorm: float = 0.0  # gradient norm of the last update, before clipping
    skipped: int = 0  # updates in a row without a finite gradient
    stopped: str | None = None  # why the student cannot continue
    services: dict[str, Callable] = field(default_factory=dict)  # TensorBoard, Weights & Biases
    state: dict[str, Tensor] = field(init=False)  # buffers of the objective, kept between updates
    trained: list[nn.Parameter] = field(init=False)

    def __post_init__(self):
        self.scored = self.scored or self.model
        is_module = isinstance(self.method.fn, nn.Module)
        self.state = dict(self.method.fn.named_buffers()) if is_module else {}
        self.trained = [*self.model.parameters(), *self.extras.parameters()]
        parts = (self.model, self.extras)
        names = {p: name for part in parts for name, p in part.named_parameters()}
        # checkpoints tell a group's settings from its state by the entries that it was made with
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["names"] = [names.get(p) for p in group["params"]]
                group["initial"] = {key: group[key] for key in group if key != "params"}

    def totals(self) -> dict[str, float]:
        """Return `sums`, added up over all processes."""
        if not self.sums:
            return {}
        totals = parallel.all_reduce_sum(torch.stack([*self.sums.values()]))
        return dict(zip(self.sums, totals, strict=True))


@dataclass
class Run:
    """How far a run has come, and what is recorded about it."""

    cfg: Config
    facts: dict  # the provenance of every result (run/startup.py)
    found: tuple = ()  # in its folder when it started (`checkpoints.read_folder`)
    step: int = 0  # updates done so far
    valid_tokens: float = 0  # labels so far
    since_log_tokens: float = 0  # labels since the last log entry
    first_step: int = 0  # at which this program started: 0, or that of a checkpoint
    began: float = 0.0  # `time.perf_counter()` when it started, later after its first update
    logged_step: int = 0  # of the last log entry
    logged_at: float = 0.0  # its `time.perf_counter()`
    wait_sec: float = 0.0  # since then, for rows and for the teacher
    save_sec: float = 0.0  # since then, for checkpoints
    save_at: float = math.inf  # `time.perf_counter()` at which process 0 asks for checkpoints
    saving: Future | None = None  # the checkpoints that process 0 is writing
    save: bool = False  # whether checkpoints are due after this update
    stop: bool = False  # whether some process has received a signal

    def start_clock(self):
        now = time.perf_counter()
        self.first_step = self.step
        self.logged_step = self.step
        self.logged_at = now
        self.began = now
        self.save_in(self.cfg.checkpoint_every_minutes)

    def save_in(self, minutes: float | None):
        """Let checkpoints be due then, if not by updates before; None: by updates alone."""
        self.save_at = time.perf_counter() + 60 * (minutes or math.inf)

    def is_due(self, every: int | None) -> bool:
        """Return whether the step is a multiple of `every`, or the last step of the run."""
        return self.step == self.cfg.max_steps or (every is not None and self.step % every == 0)

    def count_update(self, n_valid: float, has_signal: bool):
        """Count an update of `n_valid` labels, and learn whether to stop or to save after it.

        A signal may reach any process, and only process 0 looks at the clock: sums tell all.
        """
        self.step += 1
        is_late = parallel.rank() == 0 and time.perf_counter() > self.save_at
        n_valid, n_signals, n_late = parallel.all_reduce_sum([n_valid, has_signal, is_late])
        self.valid_tokens += n_valid
        self.since_log_tokens += n_valid
        self.stop = n_signals > 0
        self.save = self.stop or n_late > 0 or self.is_due(self.cfg.checkpoint_every_steps)


def n_validated(val, cfg) -> int:
    """Return the number of held-out rows that a validation reads."""
    return min(val.n, cfg.val_max_rows or val.n)


@contextlib.contextmanager
def evaluating(students: list[Student]) -> Iterator[list[metrics.Model]]:
    """Yield each student's pair (hidden, head), which lib/metrics.py expects.

    Inside, models are in evaluation, so without dropout, and sharded heads are gathered.
    """
    models = [s.scored.eval() for s in students]
    with parallel.gathered_roots(models):
        yield [(functools.partial(s.scored.hidden, dtype=s.dtype), s.scored.head) for s in students]
    for model in models:
        model.train()


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
        "valid_tokens": run.valid_tokens,
        "since_log_tokens": run.since_log_tokens,
        **run.facts,
        "made_by": record,  # of this student alone; run.facts has those of all
        "made_by_sha256": record_hash(record),
    }
