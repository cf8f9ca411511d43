"""All settings of prepare.py, train.py and compare.py: keys, config files and flags.

    python train.py config/alra_200m.py --micro_batch=8 --out_dir=out/try

A config file is plain Python: every public name that it assigns must be a field of `Config`.
Flags `--key=value` follow; the last value of a key wins. An unknown key, a wrong type or an
impossible combination raises `UserError`.
"""

import faulthandler
import inspect
import os
import re
import runpy
import signal
import sys
import traceback
import types
import typing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from lib.errors import UserError, did_you_mean, did_you_mean_path, naming_files, note
from lib.settings import (
    Below1,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveFraction,
    PositiveInt,
    check_fields,
    checked,
    literal,
    parsed,
)

try:
    import fcntl  # noqa: F401  (locks on files)
except ModuleNotFoundError:
    sys.exit("Windows is not supported; run this command in WSL, the Windows Subsystem for Linux")

# The paper's teacher and corpus, each at one commit.
TEACHER = "Qwen/Qwen1.5-1.8B@7846de7ed421727b318d6605a0bfab659da2c067"
CORPUS = "monology/pile-uncopyrighted@3be90335b66f24456a5d6659d9c8d208c0357119"


@dataclass(frozen=True)
class Config:
    """All settings. Each has one line of comment, which `--help` prints.

    One of your own needs no other place. All identify a student but those of FREE in
    run/provenance.py; a file that a setting names counts by its content.
    """

    # ---- students and teacher

    # names of losses.METHODS, or METHOD@LABEL; all share one teacher forward pass
    methods: tuple[str, ...] = ("alra",)
    # 200m, 500m, 1.8b, mini, demo, demo_teacher, WIDTHxLAYERSxHEADS, JSON object, folder or hub id
    student: str = "200m"
    # local folder or hub id that every student starts from; None: weights drawn from `seed`
    student_weights: str | None = None
    # local folder or hub id owner/name@revision; "a,b": their mean probabilities; None: no teacher
    teacher: str | None = TEACHER
    # local folder or hub id; None: the teacher's
    tokenizer: str | None = None
    # checkpoint that a new run continues, out/NAME/METHOD/checkpoints/step_..; None: start anew
    resume_from: str | None = None
    # random seed of the initial weights, and of the order of rows with `shuffle`
    seed: NonNegativeInt = 1234

    # ---- data (prepare.py writes it, train.py reads it)

    # folder of train.bin, train.json, val.bin, val.json; or several, read in order: data/a,data/b
    data_dir: str = "data/pile"
    # hub dataset; local file, folder or glob; in a config file also a mixture, a list of dicts
    source: str | list = field(default=CORPUS, hash=False)
    # "all": a mixture goes on until its last part ends; None: until the first one does
    mixture_end: Literal["all"] | None = None
    # configuration of a hub dataset, like FineWeb-Edu's sample-10BT; None: its default
    source_config: str | None = None
    # split of a hub dataset
    source_split: str = "train"
    # column or field that holds the text; "meta.text" is a field inside another one
    source_text: str = "text"
    # records to read at most, in the source's own order; None: all
    n_documents: PositiveInt | None = 2_000_000
    # training rows to write: 126,400 updates * 16 rows; None: all that the documents give
    train_rows: PositiveInt | None = 2_022_400
    # held-out rows: those after train_rows, or spread over the text; prefer val_share for own text
    val_rows: NonNegativeInt = 2_048
    # share of documents held out by hash, instead of val_rows
    val_share: Below1 = 0.0
    # processes of prepare.py that tokenize; 0: threads do. The rows are the same
    workers: NonNegativeInt = 0
    # unreadable records that prepare.py may skip; 0: it stops at the first
    max_bad_records: NonNegativeInt = 0
    # "auto": each document begins with the BOS that the tokenizer itself adds, if any; or "none"
    bos: Literal["auto", "none"] = "auto"
    # model inputs per row; a stored row has up to seq_len + 1 ids
    seq_len: PositiveInt = 512
    # visit rows in a random order drawn from `seed`, a new one for each pass
    shuffle: bool = False
    # go through the rows again if the updates need more than there are
    repeat_rows: bool = False
    # leave the token after an EOS (a document's first token, or its BOS) out of the loss
    mask_after_eos: bool = False
    # let tokens attend to their own document alone, not to earlier ones in the row
    mask_documents: bool = False

    # ---- optimisation (paper, appendix E.1)

    # updates of this run, which may end before schedule_steps
    max_steps: PositiveInt = 126_400
    # updates over which the learning rate, and settings that change in training, follow a schedule
    schedule_steps: PositiveInt = 126_400
    # rows per update
    batch_rows: PositiveInt = 16
    # rows per forward pass, at most; affects speed and memory alone; None: all of a process
    micro_batch: PositiveInt | None = None
    # rows per forward batch (the paper's B), over whose valid positions batch statistics run
    group: PositiveInt = 1
    # peak learning rate
    lr: Positive = 6e-4
    # learning rate at the end of the schedules "cosine" and "wsd"
    min_lr: Positive = 6e-5
    # updates of linear warm-up
    warmup_steps: NonNegativeInt = 512
    # AdamW's decay rate of the first moment
    beta1: Below1 = 0.9
    # AdamW's decay rate of the second moment
    beta2: Below1 = 0.98
    # AdamW's epsilon
    adam_eps: Positive = 1e-6
    # AdamW's decoupled weight decay
    weight_decay: NonNegative = 1e-2
    # decay biases and norms too; the paper does not say
    decay_1d: bool = True
    # largest gradient norm of a student
    clip: Positive = 0.5
    # updates in a row without a finite gradient that a student may skip; after one more it stops
    max_skipped_updates: NonNegativeInt = 10
    # "cosine" to min_lr; "wsd": stays at lr, then falls linearly to min_lr; "constant": stays at lr
    lr_schedule: str = "cosine"
    # share of the schedule over which "wsd" lets the rate fall
    decay_share: PositiveFraction = 0.1

    # ---- machine

    # "cpu", "cuda" or "cuda:1"; "auto": cuda if there is one, else cpu
    device: str = "auto"
    # device of the teacher; None: the students'
    teacher_device: str | None = None
    # "float32" or "bfloat16", of the forward passes; "auto": bfloat16 on cuda, float32 on cpu
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    # store the teacher's hidden states beside the rows, once, and read them from then on
    teacher_cache: bool = False
    # compute the students' activations again in the backward pass: less memory, more time
    recompute: bool = False
    # positions whose logits exist at a time, if the method allows it: several forward batches, or a
    # part of one. None: on a GPU by memory (docs/running.md), else one forward batch, at most 512
    chunk_positions: PositiveInt | None = None
    # torch.compile the objectives and the decoder layers; needs a C or C++ compiler
    compile: bool = False
    # processes over which the weights of students and teacher are sharded; 1: not sharded
    shard: PositiveInt = 1
    # minutes that a process waits for another one before the run ends
    timeout_minutes: Positive = 30.0

    # ---- the run

    # folder of the run, in which each student has a folder of its own
    out_dir: str = "out/alra_200m"
    # updates between log entries
    log_every_steps: PositiveInt = 10
    # updates between histograms of d_u and of teacher probabilities; None: no histograms
    histogram_every_steps: PositiveInt | None = None
    # write the log entries for TensorBoard too
    tensorboard: bool = False
    # Weights & Biases project that gets the log entries too; None: no project
    wandb_project: str | None = None
    # updates between validations; there is always one at the end
    val_every_steps: PositiveInt = 1_000
    # rows of val.bin that a validation reads; None: all
    val_max_rows: PositiveInt | None = 512
    # minutes between checkpoints; there is always one at the end; None: not by time
    checkpoint_every_minutes: Positive | None = 30.0
    # updates between checkpoints; None: not by updates
    checkpoint_every_steps: PositiveInt | None = None
    # newest checkpoints to keep; older ones are deleted
    keep_checkpoints: PositiveInt = 2
    # also keep those at multiples of this, itself one of checkpoint_every_steps; None: newest alone
    keep_every_steps: PositiveInt | None = None
    # dtype of the final model's weights; checkpoints are fp32
    save_dtype: Literal["float32", "bfloat16"] = "float32"

    # ---- settings of the methods

    # {"alra": {"gamma": 3.0}}; or --alra.gamma=3, and for one student --alra@LABEL.gamma=3
    hyper: dict = field(default_factory=dict, hash=False)

    def tokenizer_name(self) -> str:
        """Return the folder or hub id of the tokenizer. Raises `UserError` if there is none."""
        name = self.tokenizer or (self.teacher or "").partition(",")[0]
        if not name:
            raise UserError("tokenizer=None, teacher=None: set a folder or hub id for one of them")
        return name

    def settings_of(self, student: str) -> dict:
        """Return the settings given to METHOD or METHOD@LABEL; a label's override its method's."""
        method = student.partition("@")[0]
        return self.hyper.get(method, {}) | self.hyper.get(student, {})

    def overrides_of(self, student: str) -> dict:
        """Return the `settings_of` a student without `lr`, which is the optimizer's."""
        return {name: x for name, x in self.settings_of(student).items() if name != "lr"}

    def lr_of(self, student: str) -> float:
        """Return the peak learning rate of this student, which --METHOD.lr=X sets."""
        return self.settings_of(student).get("lr", self.lr)

    def __post_init__(self):
        check_fields(self)
        check_students(self)
        check_numbers(self)


KINDS = typing.get_type_hints(Config, include_extras=True)


def check_students(cfg):
    """Check the names of the students, and their learning rates. Raises `UserError`."""
    if not cfg.methods:
        raise UserError("methods=(): expected at least one name")
    for name in cfg.methods:
        if not re.fullmatch(r"\w+(@[\w+-][\w.+-]*)?", name):
            raise UserError(f"methods: {name!r}: expected METHOD or METHOD@LABEL")
        if cfg.methods.count(name) > 1:
            raise UserError(f"methods: duplicate {name!r}; set labels, like alra@a,alra@b")
    for name, settings in cfg.hyper.items():
        checked(f"{name}.lr", settings.get("lr", cfg.lr), Positive)


def check_numbers(cfg):
    """Check that keys do not contradict each other. Raises `UserError`."""
    for name, value in vars(cfg).items():
        if value in ("", []):
            raise UserError(f"{name}={value!r}: expected a value; None means that it is not set")
    for name in ("data_dir", "out_dir"):
        if getattr(cfg, name).startswith("~"):
            raise UserError(f"{name}={getattr(cfg, name)}: expected the folder without ~, in full")
    rows = cfg.batch_rows
    end = cfg.schedule_steps
    micro = cfg.micro_batch or rows
    if cfg.min_lr > cfg.lr:
        raise UserError(f"min_lr={cfg.min_lr}: expected at most lr={cfg.lr}")
    if cfg.max_steps > end:
        raise UserError(
            f"max_steps={cfg.max_steps}: expected at most schedule_steps={end}; set both"
        )
    if cfg.warmup_steps >= end:
        raise UserError(f"warmup_steps={cfg.warmup_steps}: expected less than schedule_steps={end}")
    keep = cfg.keep_every_steps
    if keep and (cfg.checkpoint_every_steps is None or keep % cfg.checkpoint_every_steps):
        raise UserError(
            f"keep_every_steps={keep}: expected a multiple of "
            f"checkpoint_every_steps={cfg.checkpoint_every_steps}; set both"
        )
    if rows % cfg.group:
        raise UserError(f"group={cfg.group}: expected a divisor of batch_rows={rows}")
    if micro % cfg.group:
        raise UserError(f"micro_batch={micro}: expected a multiple of group={cfg.group}")
    if rows % micro:
        raise UserError(f"micro_batch={micro}: expected a divisor of batch_rows={rows}")
    if cfg.shard > 1 and cfg.teacher_device is not None:
        raise UserError(
            f"teacher_device={cfg.teacher_device}: not supported with shard={cfg.shard}"
        )
    if cfg.val_rows and cfg.val_share:
        raise UserError(f"val_rows={cfg.val_rows} with val_share={cfg.val_share}: set one to 0")


# ----------------------------------------------------------------------------------------------
# config files and flags


def load(argv, epilog=tuple) -> Config:
    """Return the config that config files and `--key=value` flags make, in their order.

    A file may have settings of methods that the run does not train: they are left out. Those of a
    flag are refused, and so is the name of a method or setting that losses.py does not have.

    epilog  returns the lines that `--help` prints below the keys; by default none
    """
    if "-h" in argv or "--help" in argv:
        print(sys.modules["__main__"].__doc__, *key_lines(), *epilog(), sep="\n")
        sys.exit(0)
    cfg = read_config(argv)
    from losses import resolve  # imports torch

    for name in (*cfg.methods, *cfg.hyper):
        resolve(name, **cfg.overrides_of(name))  # raises `UserError`
    trained = trained_methods(cfg)
    return replace(cfg, hyper={name: x for name, x in cfg.hyper.items() if name in trained})


def read_config(argv) -> Config:
    """Return the config of a command, with the settings of all methods that its files have."""
    if not argv:
        raise UserError(
            "no config: expected one, such as config/alra_200m.py, or --KEY=VALUE; --help lists "
            "the keys"
        )
    values = {}
    hyper = {}
    flagged = set()  # methods whose settings flags set
    for arg in joined(argv):
        values |= read_argument(arg)
        more = checked("hyper", values.pop("hyper", {}), dict)
        for method, settings in more.items():
            checked(f"hyper[{method!r}]", settings, dict)
            hyper[method] = hyper.get(method, {}) | settings
        if arg.startswith("--"):
            flagged |= more.keys()
    cfg = Config(**values, hyper=hyper)
    unused = sorted(flagged - trained_methods(cfg))
    if unused:
        raise UserError(
            f"settings of {unused}, not among methods={cfg.methods}; add the method, or remove "
            "its settings"
        )
    return cfg


def joined(argv) -> list[str]:
    """Return the arguments with `--key value`, as other programs have it, as `--key=value`."""
    words = []
    for word in argv:
        if not word.startswith("--") and words and re.fullmatch("--[^=]+", words[-1]):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def check_flags(parse=read_config):
    """End a mistyped command before its script imports torch, which takes seconds.

    The first process of torchrun does it for all. `--help`, which may list what losses.py has, is
    left to the script.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    try:
        parse(sys.argv[1:])
    except (UserError, OSError):
        if not {"-h", "--help"} & {*sys.argv}:
            run(parse)
    note(f"{sys.argv[0]}: loading torch")


def trained_methods(cfg) -> set[str]:
    """Return the methods of a config, with and without their labels."""
    return {*cfg.methods, *(name.partition("@")[0] for name in cfg.methods)}


def key_lines() -> list[str]:
    """Return the lines of `--help`: each key with its default, and its comment below it."""
    lines = []
    for comment, name in re.findall(r"    # (.+)\n(?:    (\w+): )?", inspect.getsource(Config)):
        if not name:
            lines += ["", comment]
            continue
        value = getattr(Config, name, {})
        if isinstance(value, tuple):
            value = ",".join(value)
        lines += [f"  --{name}={value}", f"      {comment}"]
    return lines


def read_argument(arg: str) -> dict:
    """Return the keys that a config file or a flag sets, with their values."""
    if not arg.startswith("--"):
        return run_file(arg)
    name, equals, text = arg.removeprefix("--").partition("=")
    method, dot, setting = name.rpartition(".")
    if not dot:
        check_key(arg, name)
    if not equals:
        raise UserError(f"{arg}: expected --{name}=VALUE")
    if dot:
        return {"hyper": {method: {setting: literal(text)}}}
    return {name: parsed(text, KINDS[name])}


def run_file(path: str) -> dict:
    """Return the keys that a config file assigns.

    Names that begin with _, modules, functions and classes are its helpers. Any other name must be
    a key.
    """
    if not path.endswith(".py") or not Path(path).is_file():
        hint = did_you_mean_path(path, "*.py")
        raise UserError(f"{path}: no such config file (*.py){hint}")
    try:
        names = runpy.run_path(path)
    except (Exception, SystemExit) as error:
        raise UserError(f"{path}: does not run: {type(error).__name__}: {error}") from error
    values = {}
    for name, value in names.items():
        is_object = isinstance(value, types.ModuleType) or callable(value)
        if name in KINDS or not (name.startswith("_") or is_object):
            check_key(path, name)
            values[name] = value
    return values


def check_key(arg: str, name):
    """Raise `UserError` unless `Config` has this key."""
    if name in KINDS:
        return
    word = name.lower().replace("-", "_")
    of_method = "; a method's setting is --METHOD.SETTING=VALUE;"
    hint = did_you_mean(word, KINDS, SYNONYMS) or of_method
    helper = "" if arg.startswith("--") else " a helper's name begins with _;"
    raise UserError(f"{arg}: no such key {name!r}{hint}{helper} --help lists all")


# What people type for a key, from other codebases.
SYNONYMS = {
    "alpha": "METHOD.alpha",
    "batch_size": "batch_rows",
    "bf16": "dtype",
    "block_size": "seq_len",
    "context_length": "seq_len",
    "dataset": "source",
    "epochs": "max_steps with repeat_rows",
    "fp16": "dtype",
    "grad_clip": "clip",
    "gradient_accumulation_steps": "batch_rows with micro_batch",
    "kd": "methods=vanilla_kd",
    "learning_rate": "lr",
    "loss": "methods",
    "max_iters": "max_steps with schedule_steps",
    "max_length": "seq_len",
    "model": "student",
    "output_dir": "out_dir",
    "perplexity": "exp(CE), of the CE that eval.py prints",
    "resume": "the same command again, which resumes, or resume_from for a new run",
    "steps": "max_steps with schedule_steps",
    "tau": "METHOD.tau, as in alra.tau",
    "temperature": "METHOD.tau, as in vanilla_kd.tau",
}


# ----------------------------------------------------------------------------------------------
# scripts

TRY_AGAIN = 75  # exit code where the same command goes on (EX_TEMPFAIL in sysexits.h)


def run(main):
    """Run a script's `main` on the command's arguments, and exit with its code."""
    code = guard(lambda: main(sys.argv[1:]))
    if code and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        sys.stdout.flush()
        os._exit(code)  # to leave in order might mean to wait for a process that is lost
    sys.exit(code)


def guard(main) -> int:
    """Call a script's main function, and return the exit code of the script: 0, 1 or `TRY_AGAIN`.

    An error that the user can correct, and Ctrl-C, end in one line on stderr. Any other error
    prints its traceback. run/exits.py gives an error a code other than 1.
    """
    faulthandler.enable(2)  # a library's crash, like NCCL's, prints where it was
    faulthandler.register(signal.SIGQUIT, 2)  # Ctrl-\ prints where every thread is
    try:
        with naming_files():
            code = main() or 0
            sys.stdout.flush()
            return code
    except KeyboardInterrupt:
        note("\nstopped")
        return TRY_AGAIN
    except BrokenPipeError:  # nobody reads the output, as after `| head -1`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return TRY_AGAIN
    except Exception as error:
        is_first = os.environ.get("LOCAL_RANK", "0") == "0"
        if not isinstance(error, UserError):
            traceback.print_exc()
        elif is_first or not error.is_shared:
            note(f"UserError: {error}")
        return getattr(error, "exit_code", 1)
