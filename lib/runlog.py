"""What a run tells about itself: facts, speed, log lines, and the services that receive the log.

Nothing here changes what is learnt.
"""

import contextlib
import importlib.util
import platform
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers

from lib.device import device_name
from lib.files import UserError, write_whole
from model import Qwen2Config

# Dense bf16 products with fp32 accumulation, FLOP/s, as the makers' data sheets give them.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12, "RTX 3090": 71e12}


def machine_facts(device: torch.device) -> dict:
    """Commit, versions and machine: part of what a result must be read with."""
    commit = None
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # no git, or no repository
        commit = subprocess.check_output(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, stderr=subprocess.DEVNULL, text=True
        ).strip()
    return {
        "git_commit": commit,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
        "machine": device_name(device),
    }


# --- speed -----------------------------------------------------------------------------------------------------------


def flops_per_token(shape: Qwen2Config, seq_len: int, trained: bool) -> float:
    """FLOPs of one token.

    Two per weight of every matrix that multiplies it (the head, but not the embedding look-up), and 2 * 2 * H * K * T / 2
    per layer for causal attention; three times that where a backward pass follows.
    """
    d, k = shape.hidden_size, shape.head_dim
    attention = d * k * (2 * shape.num_attention_heads + 2 * shape.num_key_value_heads)
    matrices = shape.num_hidden_layers * (attention + 3 * d * shape.intermediate_size) + shape.vocab_size * d
    scores = shape.num_hidden_layers * 2 * shape.num_attention_heads * k * seq_len
    return (2 * matrices + scores) * (3 if trained else 1)


def mfu(flops_per_sec: float, device: torch.device, world: int) -> float | None:
    """The share of all cards' peak that these FLOP/s are; None on an unknown card."""
    if device.type != "cuda":
        return None
    card = torch.cuda.get_device_name(device)
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in card), None)
    return flops_per_sec / (peak * world) if peak else None


@dataclass
class Clock:
    """Counts since the last log line and since the process began."""

    begun_step: int = 0  # where this process took over
    begun: float = field(default_factory=lambda: time.perf_counter())
    valid_tokens: int = 0  # of all updates of the run
    line_steps: int = 0  # since the last line
    line_valid: int = 0
    line_sec: float = 0.0  # inside updates only
    asides: dict[str, float] = field(default_factory=dict)  # seconds of this process outside updates

    def count(self, n_valid: int, seconds: float) -> None:
        self.valid_tokens += n_valid
        self.line_valid += n_valid
        self.line_steps += 1
        self.line_sec += seconds

    def start_line(self) -> None:
        self.line_valid, self.line_steps, self.line_sec = 0, 0, 0.0

    def eta_sec(self, step: int, max_steps: int) -> float:
        """Seconds left at the pace of this process."""
        return (time.perf_counter() - self.begun) / (step - self.begun_step) * (max_steps - step)

    @contextlib.contextmanager
    def aside(self, what: str) -> Iterator[None]:
        """Count the seconds that something beside the updates takes."""
        t0 = time.perf_counter()
        yield
        self.asides[what] = self.asides.get(what, 0.0) + time.perf_counter() - t0

    def summary(self, step: int) -> str:
        sec = time.perf_counter() - self.begun
        of_it = ", ".join(f"{hours(value)} in {what}" for what, value in self.asides.items())
        n = step - self.begun_step
        return f"{n} step{'s' * (n != 1)} in {hours(sec)}{f', of which {of_it}' if of_it else ''}"

    def state(self) -> dict:
        """What a checkpoint keeps."""
        return {key: getattr(self, key) for key in CLOCK_KEYS}


CLOCK_KEYS = ("valid_tokens", "line_steps", "line_valid", "line_sec")


# --- lines -----------------------------------------------------------------------------------------------------------

WIDTH = 160  # columns of the longest line


def table_lines(first: str, columns: dict[str, str], width: int = WIDTH) -> tuple[list[str], list[str]]:
    """A row of a table as lines of at most `width` characters -> its head and the row; columns that do not fit go below.

    columns  by name, the text of each cell; a name of more than 14 characters keeps its end
    """
    heads, rows = [" " * len(first)], [first]
    for name, text in columns.items():
        name = name if len(name) <= 14 else "…" + name[-13:]
        n = max(len(name), len(text), 6) + 2
        if len(rows[-1]) + n > width:
            heads.append(" " * len(first))
            rows.append(" " * len(first))
        heads[-1] += f"{name:>{n}}"
        rows[-1] += f"{text:>{n}}"
    return heads, rows


def step_text(record: dict, max_steps: int) -> str:
    """What all students share in a row of the log."""
    step, used = f"step {record['step']}/{max_steps}", f"  mfu {record['mfu']:.0%}" if record["mfu"] else ""
    return (
        f"{step:<{2 * len(str(max_steps)) + 6}}  lr {record['lr']:.1e}  "
        f"{record['tok_per_sec'] / 1e3:6.1f}k tok/s{used}  eta {hours(record['eta_sec']):>6}"
    )


def hours(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f}s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}h{minutes % 60:02d}m" if minutes >= 60 else f"{minutes}m{seconds:02d}s"


# --- services that receive the log's records -------------------------------------------------------------------------


def check_sinks(tensorboard: bool, wandb_project: str | None) -> None:
    """`UserError` where a service is asked for whose package is not installed."""
    asked = [("tensorboard", f"tensorboard={tensorboard}")] if tensorboard else []
    asked += [("wandb", f"wandb_project={wandb_project}")] if wandb_project else []
    for package, key in asked:
        if importlib.util.find_spec(package) is None:
            raise UserError(f"{key}: {package} is not installed; run `pip install {package}`, or leave it off")


class Sink(NamedTuple):
    """A service that receives a student's log."""

    record: Callable[[dict], None]  # takes a record of log.jsonl
    end: Callable[[dict, list[Path]], None]  # takes the student's facts and pictures at the end of its run


def open_sinks(folder: Path, tensorboard: bool, wandb_project: str | None, about: dict) -> list[Sink]:
    """TensorBoard and Weights & Biases for the student in `folder`, where asked for.

    about  the run's config and facts, for Weights & Biases. Its id is kept in the folder, so that a run that goes on is the
           same one there, and runs of equal names in other places are not. Steps that it has are not sent again.
    """
    sinks = [to_tensorboard(folder)] if tensorboard else []
    return sinks + ([to_wandb(folder, wandb_project, about)] if wandb_project else [])


def to_tensorboard(folder: Path) -> Sink:
    from PIL import Image
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder / "tensorboard")

    def record(values: dict) -> None:
        for key, value in values.items():
            if key != "step" and value is not None:
                writer.add_scalar(key, value, values["step"])

    def end(facts: dict, pictures: list[Path]) -> None:
        for path in pictures:
            writer.add_image(path.stem, np.asarray(Image.open(path).convert("RGB")), facts["step"], dataformats="HWC")
        writer.close()

    return Sink(record, end)


def to_wandb(folder: Path, project: str, about: dict) -> Sink:
    import wandb

    file = folder / "wandb_id"
    if not file.is_file():
        write_whole(file, uuid.uuid4().hex[:12])
    run = wandb.init(
        project=project, group=str(folder.parent), name=folder.name, id=file.read_text(), dir=folder,
        config=about, resume="allow", reinit="create_new",
    )  # fmt: skip
    there = run.step  # the next step where it goes on, 0 where it is new

    def record(values: dict) -> None:
        if values["step"] >= there:
            run.log(values, step=values["step"])

    def end(facts: dict, pictures: list[Path]) -> None:
        run.log({path.stem: wandb.Image(str(path)) for path in pictures}, step=max(facts["step"], there))
        run.summary.update(facts)
        run.finish()

    return Sink(record, end)
