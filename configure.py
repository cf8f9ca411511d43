"""All settings of the project, and the only reader of config files and flags.

    python train.py config/alra_200m.py --micro_batch=8 --out_dir=out/try

A config file is plain Python: every public name that it assigns must be a field of `Config`. `--key=value` flags follow;
the last one wins. An unknown key, a wrong type or an impossible combination raises `UserError`.
"""

import inspect
import os
import re
import sys
import tempfile
import traceback
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Literal

from lib.errors import UserError, first_line, nearest, require
from lib.settings import (
    Below1,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveFraction,
    PositiveInt,
    checked,
    literal,
    parsed,
)

TEACHER = "Qwen/Qwen1.5-1.8B@7846de7ed421727b318d6605a0bfab659da2c067"  # the paper's, at one commit
CORPUS = "monology/pile-uncopyrighted@3be90335b66f24456a5d6659d9c8d208c0357119"


def _role(role: str) -> Callable:
    return lambda default=MISSING, **how: field(default=default, metadata={"role": role}, **how)


# What a key decides. run/identity.py says which of them a student is known by.
learnt = _role("learnt")  # what a student learns
place = _role("place")  # where something is found: its content counts, not its name
data = _role("data")  # what prepare.py writes: known by its content
speed = _role("speed")  # where and how fast it is computed: rounding at most
log = _role("log")  # what is written down and kept


# fmt: off
@dataclass(frozen=True)
class Config:
    # --- who learns from whom
    methods: tuple[str, ...] = learnt(("alra",))  # names in losses.METHODS, or METHOD@LABEL; all share one teacher forward
    student: str = place("200m")  # its shape: a preset, WIDTHxLAYERSxHEADS, a JSON object, or a config.json (or its folder)
    student_weights: str | None = place(None)  # local folder or hub id that every student starts from; None: drawn from `seed`
    teacher: str | None = place(TEACHER)  # local folder or hub id (owner/name@revision); None: no method needs one
    tokenizer: str | None = place(None)  # local folder or hub id; None: the teacher's
    resume_from: str | None = place(None)  # a checkpoint, out/NAME/METHOD/checkpoints/step_.., whose weights, moments and step a new run begins with
    seed: NonNegativeInt = learnt(1234)  # of the initial weights, and of the order of rows with `shuffle`

    # --- data (prepare.py writes it, train.py reads it)
    data_dir: str = place("data/pile")  # holds train.bin, train.json, val.bin, val.json
    source: str = data(CORPUS)  # hub dataset; local file, folder or glob; "a:0.7,b:0.3": a mixture
    source_config: str | None = data(None)  # hub only: a configuration of the dataset, like FineWeb-Edu's sample-10BT
    source_split: str = data("train")  # hub only
    source_text: str = data("text")  # the column or field that holds the text, in every source
    n_documents: PositiveInt | None = data(2_000_000)  # records to read at most, in the source's own order; None: all
    train_rows: PositiveInt | None = data(2_022_400)  # 126,400 updates * 16 rows; None: all that the documents give
    val_rows: NonNegativeInt = data(2_048)  # the last rows of the stream, so of the last file; for your own text prefer val_share
    val_share: Below1 = data(0.0)  # share of documents held out by hash, instead of val_rows
    max_bad_records: NonNegativeInt = data(0)  # records that may be skipped because they cannot be read; 0: stop at the first
    bos: Literal["auto", "none"] = data("auto")  # "auto": before each document the BOS that the tokenizer itself adds, if any
    seq_len: PositiveInt = learnt(512)  # model inputs per row; a stored row has up to seq_len + 1 ids
    shuffle: bool = learnt(False)  # visit the rows in an order drawn from `seed`, another one for each pass
    repeat_rows: bool = data(False)  # go through the rows again when the steps ask for more than there are
    mask_after_eos: bool = learnt(False)  # leave the token after an EOS (the first of a document, or its BOS) out of the loss

    # --- optimisation (paper, appendix E.1)
    max_steps: PositiveInt = learnt(126_400)  # updates of this run; may end before schedule_steps
    schedule_steps: PositiveInt = learnt(126_400)  # updates of the whole schedule, at whose end the rate is min_lr
    batch_rows: PositiveInt = learnt(16)  # rows per update
    micro_batch: PositiveInt | None = speed(None)  # rows per forward pass; affects speed and memory, never the result; None: all rows of a process
    group: PositiveInt = learnt(1)  # rows per forward batch T_B of the paper: the range of batch statistics
    lr: Positive = learnt(6e-4)  # peak learning rate
    min_lr: Positive = learnt(6e-5)  # at schedule_steps
    warmup_steps: NonNegativeInt = learnt(512)  # updates of linear warm-up
    beta1: Below1 = learnt(0.9)  # AdamW
    beta2: Below1 = learnt(0.98)  # AdamW
    adam_eps: Positive = learnt(1e-6)  # AdamW
    weight_decay: NonNegative = learnt(1e-2)  # AdamW, decoupled
    decay_1d: bool = learnt(True)  # decay biases and norms too; the paper does not say
    clip: Positive = learnt(0.5)  # largest gradient norm
    max_skipped_updates: NonNegativeInt = log(10)  # in a row, without a finite gradient, before a student stops
    lr_schedule: Literal["cosine", "wsd", "constant"] = learnt("cosine")  # to min_lr; "wsd" (warm-up, stable, decay): lr stays until the last `decay_share` of the schedule, then falls linearly to min_lr; "constant": no min_lr
    decay_share: PositiveFraction = learnt(0.1)  # of the schedule, with "wsd"
    w_kd_schedule: Literal["constant", "wsd"] = learnt("constant")  # "wsd": w_kd rises over 10 % of the schedule and falls in its last 1 %, w_ce = 1 - w_kd

    # --- machine
    device: str = speed("auto")  # "cpu", "cuda", "cuda:1"; "auto": cuda where there is one, else cpu
    teacher_device: str | None = speed(None)  # None: the student's
    dtype: Literal["auto", "float32", "bfloat16"] = learnt("auto")  # of the forward passes; "auto": bfloat16 on cuda, float32 on cpu
    teacher_cache: bool = speed(False)  # keep the teacher's hidden states of the rows beside them: computed once, then read; `python -m run.cache CONFIG` computes them ahead
    recompute: bool = speed(False)  # drop the students' activations and compute them again: less memory, more time
    compile: bool = speed(False)  # torch.compile the objectives and the decoder layers (needs a C or C++ compiler)
    shard: PositiveInt = speed(1)  # processes over which the weights of students and teacher are sharded; 1: each holds all of them
    timeout_minutes: Positive = speed(30.0)  # how long a process waits for another before the run ends

    # --- the run
    out_dir: str = place("out/alra_200m")  # one folder per run; each method has a folder of its own inside
    log_every_steps: PositiveInt = log(10)  # updates between lines of the log
    histogram_every_steps: PositiveInt | None = log(None)  # updates between histograms of d_u and of teacher probabilities
    tensorboard: bool = log(False)  # write the log's records for TensorBoard too
    wandb_project: str | None = log(None)  # send them to Weights & Biases too, under this project
    val_every_steps: PositiveInt = log(1_000)  # updates between validations; there is always one at the end
    val_max_rows: PositiveInt | None = log(512)  # rows of val.bin that a validation reads; None: all
    checkpoint_every_minutes: Positive | None = log(30.0)  # minutes between checkpoints; there is always one at the end
    checkpoint_every_steps: PositiveInt | None = log(None)  # updates between checkpoints, besides
    keep_checkpoints: PositiveInt = log(2)  # the last ones; older ones are removed
    keep_every_steps: PositiveInt | None = log(None)  # and, besides, those of its multiples

    # --- settings of the methods
    hyper: dict = learnt(default_factory=dict, hash=False)  # by method, {"alra": {"gamma": 3.0}}; --alra.gamma=3 sets one, --alra@LABEL.gamma=3 that of one student

    def settings_of(self, student: str) -> dict:
        """The settings given to METHOD or METHOD@LABEL; a label's own override its method's."""
        return self.hyper.get(student.partition("@")[0], {}) | self.hyper.get(student, {})

    def overrides_of(self, student: str) -> dict:
        """Those of `settings_of` that are its objective's."""
        return {key: value for key, value in self.settings_of(student).items() if key != "lr"}

    def lr_factor(self, student: str) -> float:
        """The factor of the schedule's rate for this student: with --METHOD.lr=X it is X / lr, from first to last."""
        return self.settings_of(student).get("lr", self.lr) / self.lr

    def __post_init__(self):
        for key, kind in KINDS.items():
            object.__setattr__(self, key, checked(key, getattr(self, key), kind))
        for name in self.methods:
            require(re.fullmatch(r"\w+(@[\w+-][\w.+-]*)?", name), f"methods: {name!r}: expected METHOD or METHOD@LABEL")
        for name, settings in self.hyper.items():
            require(type(settings) is dict, f"hyper[{name!r}]={settings!r}: expected a dict of settings")
            checked(f"{name}.lr", settings.get("lr", self.lr), Positive)
        schedule, rows, micro = self.schedule_steps, self.batch_rows, self.micro_batch
        duplicates = [name for name in self.methods if self.methods.count(name) > 1]
        for ok, message in (
            (self.methods, "methods=(): expected at least one name"),
            (not duplicates, f"methods: duplicate {duplicates[:1]}; give each student a label, like alra@a,alra@b"),
            (rows <= 2**20, f"batch_rows={rows}: expected at most {2**20}"),
            (self.min_lr <= self.lr, f"min_lr={self.min_lr}: expected at most lr={self.lr}"),
            (self.max_steps <= schedule, f"max_steps={self.max_steps}: expected at most schedule_steps={schedule}, where the rate ends; set both"),
            (self.warmup_steps < schedule, f"warmup_steps={self.warmup_steps}: expected less than schedule_steps={schedule}"),
            (rows % self.group == 0, f"group={self.group}: expected a divisor of batch_rows={rows}"),
            ((micro or self.group) % self.group == 0, f"micro_batch={micro}: expected a multiple of group={self.group}"),
            (rows % (micro or 1) == 0, f"micro_batch={micro}: expected a divisor of batch_rows={rows}"),
            (self.shard == 1 or self.teacher_device is None, f"teacher_device={self.teacher_device}: not supported with shard={self.shard}; leave one out"),
            (not (self.val_rows and self.val_share), f"val_rows={self.val_rows} with val_share={self.val_share}: set one of them to 0"),
        ):
            require(ok, message)


# fmt: on
KINDS = typing.get_type_hints(Config, include_extras=True)
ROLES = {f.name: f.metadata["role"] for f in fields(Config)}  # KeyError: a key that does not say what it decides
# What people type for a key, from other codebases.
SYNONYMS = {
    "learning_rate": "lr", "max_lr": "lr", "steps": "max_steps with schedule_steps", "max_iters": "max_steps with schedule_steps",
    "epochs": "max_steps with repeat_rows", "num_epochs": "max_steps with repeat_rows", "batch_size": "batch_rows", "micro_batch_size": "micro_batch",
    "gradient_accumulation_steps": "batch_rows with micro_batch", "block_size": "seq_len", "max_length": "seq_len",
    "context_length": "seq_len", "grad_clip": "clip", "dataset": "source", "method": "methods", "loss": "methods", "kd": "methods=vanilla_kd",
    "model": "student", "output_dir": "out_dir", "fp16": "dtype", "bf16": "dtype", "gpus": "torchrun", "gpu": "device",
    "temperature": "METHOD.tau, as in vanilla_kd.tau", "tau": "METHOD.tau, as in alra.tau", "alpha": "METHOD.alpha",
    "resume": "the same command again, which resumes, or resume_from for a new run from a checkpoint",
    "perplexity": "exp(CE), of the CE that eval.py prints", "ppl": "exp(CE), of the CE that eval.py prints",
}  # fmt: skip


def load(argv: list[str], epilog: Callable[[], Iterable[str]] = tuple) -> Config:
    """Config files and `--key=value` flags, in order -> the config. `--help` prints all keys and `epilog`, and exits."""
    if {"-h", "--help"} & set(argv):
        keys = inspect.getsource(Config).split("\n    def ")[0]
        print(sys.modules["__main__"].__doc__, keys, *epilog(), sep="\n")
        sys.exit(0)
    require(argv, "no config: expected one, such as config/alra_200m.py, or --KEY=VALUE; --help lists the keys")
    values, hyper = {}, {}
    for arg in argv:
        key, equals, text = arg.removeprefix("--").partition("=")
        method, dot, setting = key.rpartition(".")
        if not arg.startswith("--"):
            given = _run_file(arg)
        elif dot:
            given = {"hyper": {method: {setting: literal(text)}}}
        else:
            given = {key: parsed(text, KINDS.get(key, str))}
        for key, value in given.items():
            if key not in KINDS:
                near = SYNONYMS.get(word := key.lower().replace("-", "_")) or nearest(word, KINDS)
                hint = f", did you mean {near}? " if near else "; a method's setting is --METHOD.SETTING=VALUE; "
                raise UserError(f"{arg}: no such key {key!r}{hint}--help lists all")
            require(equals or not arg.startswith("--"), f"{arg}: expected --{key}=VALUE")
            values[key] = value
            if key == "hyper" and isinstance(value, dict):  # several sources add up
                hyper |= {
                    name: hyper.get(name, {}) | own if isinstance(own, dict) else own for name, own in value.items()
                }
                values[key] = hyper
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


def guard(main: Callable[[], int | None]) -> int:
    """Run a script's `main` -> its exit code. An error that the user can correct is one line without a traceback, like Ctrl-C."""
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
        text = error if isinstance(error, UserError) else first_line(error)
        print(f"{type(error).__name__}: {text}", file=sys.stderr)
        return 1
    except Exception as error:  # nobody foresaw it: one line here, all of it in a file
        at, file = traceback.extract_tb(error.__traceback__)[-1], Path(tempfile.mkstemp("-traceback.txt")[1])
        file.write_text("".join(traceback.format_exception(error)))
        where = f"{at.filename}, line {at.lineno}; all of it in {file}"
        print(f"{type(error).__name__}: {first_line(error)} ({where})", file=sys.stderr)
        return 1
