"""All settings of the project, and the only reader of config files and flags.

    python train.py config/alra_200m.py --micro_batch=8 --out_dir=out/try

A config file is plain Python; every public name that it leaves behind must be a field of `Config`. Then come the
`--key=value` flags, later ones winning. An unknown key, a wrong type or an impossible combination is a `UserError`.
"""

import ast
import inspect
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lib.files import UserError, first_line, nearest

TEACHER = "Qwen/Qwen1.5-1.8B@7846de7ed421727b318d6605a0bfab659da2c067"  # the paper's, at one commit
CORPUS = "monology/pile-uncopyrighted@3be90335b66f24456a5d6659d9c8d208c0357119"


# fmt: off

@dataclass(frozen=True)
class Config:
    # --- who learns from whom
    methods: tuple[str, ...] = ("alra",)  # names in losses.METHODS, or METHOD@LABEL; all share one teacher forward
    student: str = "200m"  # its shape: a preset, WIDTHxLAYERSxHEADS, a JSON object, or a config.json (or its folder)
    student_weights: str | None = None  # local folder or hub id that every student starts from; None: drawn from `seed`
    teacher: str | None = TEACHER  # local folder or hub id (owner/name@revision); None: no method needs one
    tokenizer: str | None = None  # local folder or hub id; None: the teacher's
    seed: int = 1234  # of the student's initial weights

    # --- data (prepare.py writes it, train.py reads it)
    data_dir: str = "data/pile"  # holds train.bin, train.json, val.bin, val.json
    source: str = CORPUS  # hub dataset; local file, folder or glob; or "python": its own docs and library
    source_revision: str | None = None  # hub only: a commit or tag, where the source names none
    source_config: str | None = None  # hub only: a configuration of the dataset, like FineWeb-Edu's sample-10BT
    source_split: str = "train"  # hub only
    source_text: str = "text"  # the column or field that holds the text; of these four one for all, or a,b for a mixture
    n_documents: int | None = 2_000_000  # records to read at most, in the source's own order; None: all
    train_rows: int | None = 2_022_400  # 126,400 updates * 16 rows; None: all that the documents give
    val_rows: int = 2_048  # the last rows of the stream, so of the last file; for your own text prefer val_share
    val_share: float = 0.0  # share of documents held out by hash, instead of val_rows
    bos: Literal["auto", "none"] = "auto"  # "auto": before each document the BOS that the tokenizer itself adds, if any
    seq_len: int = 512  # model inputs per row; a stored row has up to seq_len + 1 ids
    prepare_workers: int = 1  # tokenizer processes; any number gives the same bytes
    shuffle: bool = False  # visit the rows in an order drawn from `seed`, a new one for each pass
    repeat_rows: bool = False  # go through the rows again when the steps ask for more than there are
    mask_after_eos: bool = False  # leave the token after an EOS (the first of a document, or its BOS) out of the loss

    # --- optimisation (paper, appendix D.1)
    max_steps: int = 126_400  # updates of this run; may end before schedule_steps
    schedule_steps: int = 126_400  # updates of the whole schedule, at whose end the rate is min_lr
    batch_rows: int = 16  # rows per update
    micro_batch: int | None = None  # rows per model forward: speed and memory only, never the result; None: what fits the GPU, 1 on the CPU
    group: int = 1  # rows per forward batch T_B of the paper: the range of batch statistics
    lr: float = 6e-4  # peak learning rate
    min_lr: float = 6e-5  # at schedule_steps
    warmup_steps: int = 512  # updates of linear warm-up
    beta1: float = 0.9  # AdamW
    beta2: float = 0.98  # AdamW
    adam_eps: float = 1e-6  # AdamW
    weight_decay: float = 1e-2  # AdamW, decoupled
    decay_1d: bool = True  # decay biases and norms too, as the pipeline of the paper does
    clip: float = 0.5  # largest gradient norm
    lr_schedule: Literal["cosine", "wsd", "constant"] = "cosine"  # to min_lr; "wsd": lr stays until the last 10 % of the schedule, then falls linearly to min_lr
    w_kd_schedule: Literal["constant", "wsd"] = "constant"  # "wsd": w_kd rises over 10 % of the schedule and falls in its last 1 %, w_ce = 1 - w_kd

    # --- machine
    device: str = "auto"  # "cpu", "cuda", "cuda:1"; "auto": cuda where there is one, else cpu
    teacher_device: str | None = None  # None: the student's
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the forward passes; "auto": bfloat16 on cuda, float32 on cpu
    recompute: bool = False  # drop the students' activations and compute them again: less memory, more time
    compile: bool = False  # torch.compile the objectives and the decoder layers (needs a C or C++ compiler)
    shard: int = 1  # processes over which the weights of students and teacher are spread; 1: each holds all of them
    timeout_minutes: float = 30.0  # how long a process waits for another one before the run ends

    # --- the run
    out_dir: str = "out/alra_200m"  # one folder per run; each method has a folder of its own inside
    log_every_steps: int = 10  # updates between lines of the log
    histogram_every_steps: int | None = None  # updates between histograms of d_u and of teacher probabilities
    tensorboard: bool = False  # write the log's records for TensorBoard too
    wandb_project: str | None = None  # send them to Weights & Biases too, under this project
    val_every_steps: int = 1_000  # updates between validations; there is always one at the end
    val_max_rows: int | None = 512  # rows of val.bin that a validation reads; None: all
    checkpoint_every_minutes: float | None = 30.0  # minutes between checkpoints; there is always one at the end
    checkpoint_every_steps: int | None = None  # updates between checkpoints, besides
    keep_checkpoints: int = 2  # the last ones; older ones are removed

    # --- settings of the methods
    hyper: dict = field(default_factory=dict, hash=False)  # by method, {"alra": {"gamma": 3.0}}; --alra.gamma=3 sets one, --alra@LABEL.gamma=3 that of one student
    def settings_of(self, student: str) -> dict:
        """The settings given to METHOD or METHOD@LABEL; a label's own come on top of its method's."""
        return self.hyper.get(student.partition("@")[0], {}) | self.hyper.get(student, {})

    def overrides_of(self, student: str) -> dict:
        """Those of `settings_of` that are its objective's."""
        return {key: value for key, value in self.settings_of(student).items() if key != "lr"}

    def lr_factor(self, student: str) -> float:
        """What the schedule's rate is multiplied by for this student: by --METHOD.lr=X it is X / lr, from first to last."""
        return self.settings_of(student).get("lr", self.lr) / self.lr

    def __post_init__(self):
        for key, kind in TYPES.items():
            object.__setattr__(self, key, _typed(key, getattr(self, key), kind))
        for low, keys in LEAST.items():
            for key in keys.split():
                value = getattr(self, key)
                require(value is None or low <= value < 2**53, f"{key}={value}: expected {'at least' if low in (0, 1) else 'more than'} {low:.0f}")
        schedule, rows = self.schedule_steps, self.batch_rows
        for ok, message in (
            (max(self.beta1, self.beta2, self.val_share) < 1, "beta1, beta2, val_share: expected less than 1"),
            (self.methods, "methods=(): expected at least one name"),
            (len({*self.methods}) == len(self.methods), f"methods={self.methods}: one stands there twice; each has one folder"),
            (self.batch_rows <= 2**20, f"batch_rows={rows}: expected at most {2**20}"),
            (self.min_lr <= self.lr, f"min_lr={self.min_lr}: expected at most lr={self.lr}"),
            (self.max_steps <= schedule, f"max_steps={self.max_steps}: expected at most schedule_steps={schedule}, where the rate ends"),
            (self.warmup_steps < schedule, f"warmup_steps={self.warmup_steps}: expected less than schedule_steps={schedule}"),
            (rows % self.group == 0, f"group={self.group}: expected a divisor of batch_rows={rows}"),
            ((self.micro_batch or self.group) % self.group == 0, f"micro_batch={self.micro_batch}: expected a multiple of group={self.group}"),
            (rows % (self.micro_batch or 1) == 0, f"micro_batch={self.micro_batch}: expected a divisor of batch_rows={rows}"),
            (self.shard == 1 or self.teacher_device is None, f"teacher_device={self.teacher_device}: not with shard={self.shard}"),
            (not (self.val_rows and self.val_share), f"val_rows={self.val_rows} with val_share={self.val_share}: set one to 0"),
            *((re.fullmatch(r"\w+(@[\w+-][\w.+-]*)?", name), f"methods: {name!r}: expected METHOD or METHOD@LABEL") for name in self.methods),
            *((type(of) is dict and 0 < _number(of.get("lr", self.lr)) < math.inf, f"hyper[{name!r}]={of!r}: expected settings, lr above 0")
              for name, of in self.hyper.items()),
        ):
            require(ok, message)


# fmt: on
TYPES = typing.get_type_hints(Config)
LEAST = {  # of the keys with a number; 5e-324: above 0
    1: "max_steps schedule_steps batch_rows micro_batch group seq_len prepare_workers log_every_steps val_every_steps val_max_rows "
    "keep_checkpoints shard n_documents train_rows histogram_every_steps checkpoint_every_steps",
    5e-324: "lr min_lr clip adam_eps timeout_minutes checkpoint_every_minutes",
    0: "weight_decay warmup_steps val_rows seed beta1 beta2 val_share",
}
# What decides what is learnt. Runs that differ in other keys alone are the same run; of data, teacher and tokenizer the content is compared.
LEARNT = frozenset(
    "methods student student_weights seed seq_len shuffle mask_after_eos schedule_steps batch_rows group lr min_lr warmup_steps beta1 beta2 "
    "adam_eps weight_decay decay_1d clip lr_schedule w_kd_schedule dtype hyper".split()
)


def load(argv: list[str], about: Callable[[], Iterable[str]] = tuple) -> Config:
    """Config files and `--key=value` flags, in order -> the config. `--help` prints all keys and `about`, and ends the process."""
    values, hyper = {}, {}
    if {"-h", "--help"} & set(argv):
        keys = inspect.getsource(Config).split("\n    def ")[0]
        print(sys.modules["__main__"].__doc__, keys, *about(), sep="\n")
        sys.exit(0)
    require(argv, "no config: expected one, like config/alra_200m.py, or --KEY=VALUE; --help lists the keys")
    for arg in argv:
        key, sep, text = arg.removeprefix("--").partition("=")
        method, dot, setting = key.rpartition(".")
        if not arg.startswith("--"):
            found = _run_file(arg)
        elif dot:
            found = {"hyper": {method: {setting: literal(text)}}}
        else:
            found = {key: _parse(text, TYPES.get(key, str))}
        for key, value in found.items():
            if key not in TYPES:
                near = nearest(key, TYPES)
                hint = f", did you mean {near!r}?" if near else ""
                raise UserError(
                    f"{arg}: no such key {key!r}{hint}; a method's settings are --METHOD.SETTING=VALUE; --help lists all"
                )
            require(sep or not arg.startswith("--"), f"{arg}: expected --{key}=VALUE")
            if key == "hyper":  # several sources add up
                for method, of in value.items():
                    hyper[method] = hyper.get(method, {}) | of if isinstance(of, dict) else of
            values[key] = hyper if key == "hyper" else value
    return Config(**values)


def _run_file(path: str) -> dict:
    """The public names that a config file assigns."""
    if not path.endswith(".py") or not Path(path).is_file():
        near = nearest(path, map(str, Path(path).parent.glob("*.py")))
        raise UserError(f"{path}: no such config file (*.py)" + (f", did you mean {near}?" if near else ""))
    names: dict = {}
    try:
        exec(compile(Path(path).read_text(), path, "exec"), names)
    except (Exception, SystemExit) as error:
        raise UserError(f"{path}: does not run: {type(error).__name__}: {error}") from error
    return {k: v for k, v in names.items() if not k.startswith("_") and not isinstance(v, types.ModuleType)}


def literal(text: str) -> object:
    """The text as a Python literal if it is one, else unchanged."""
    try:
        return ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, SyntaxError):
        return text


def _parse(text: str, kind) -> object:
    """The text after `--key=` as a value: a str where the key takes one, a Python literal elsewhere."""
    kinds = typing.get_args(kind) or (kind,)
    if text in ("None", "none") and type(None) in kinds:
        return None
    if kind == tuple[str, ...]:
        return tuple(filter(None, text.split(",")))
    return text if str in kinds or typing.get_origin(kind) is Literal else literal(text)


def _typed(key: str, value: object, kind) -> object:
    """`value` as its field's type. An int becomes a float and a list of names a tuple; nothing else converts."""
    kinds = typing.get_args(kind) or (kind,)
    if typing.get_origin(kind) is Literal:
        ok = value in kinds
    elif kind == tuple[str, ...]:
        ok = isinstance(value, tuple | list) and all(isinstance(name, str) for name in value)
        value = tuple(value) if ok else value
    else:
        value = float(value) if float in kinds and type(value) is int else value
        ok = type(value) in kinds
    require(
        ok,
        f"{key}={value!r}: expected {kind.__name__ if isinstance(kind, type) else str(kind).removeprefix('typing.')}",
    )
    return value


def _number(value: object) -> float:
    return value if type(value) in (int, float) else math.nan


def require(ok: object, message: str) -> None:
    if not ok:
        raise UserError(message)


def guard(main: Callable[[], int | None]) -> int:
    """Run a script's `main` -> its exit code. What a user can mend is one line, without a traceback; so is Ctrl-C."""
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may lack a character
    try:
        return main() or 0
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, MemoryError) as error:
        print(
            f"{type(error).__name__}: {error if isinstance(error, UserError) else first_line(error)}", file=sys.stderr
        )
        return 1
