"""All settings of the project, and the only reader of config files and flags.

    python train.py config/alra_200m.py --micro_batch=8 --out_dir=out/try

A config file is plain Python assignments; it is run in a namespace of its own, and every name it leaves
behind (but for names that start with an underscore, and modules) must be a field of `Config`. Then come the
`--key=value` flags, later ones winning. Nothing is guessed: an unknown key, a wrong type or an impossible
combination raises `ConfigError`. The resolved config is written into the run's folder by `save`.
"""

import ast
import contextlib
import dataclasses
import inspect
import io
import math
import os
import re
import sys
import textwrap
import tokenize
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError

from lib.files import RENAMED, UserError, first_line, nearest, write_json


class ConfigError(UserError):
    """An impossible configuration: what, got, expected, what to do."""


TEACHER = "Qwen/Qwen1.5-1.8B@7846de7ed421727b318d6605a0bfab659da2c067"  # the paper's, at one commit
CORPUS = "monology/pile-uncopyrighted@3be90335b66f24456a5d6659d9c8d208c0357119"


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
    source_config: str | None = None  # hub only: a configuration of the dataset, like FineWeb-Edu's sample-10BT
    source_split: str = "train"  # hub only
    source_text: str = (
        "text"  # the column or field that holds the text; of these four one for all, or a,b for a mixture
    )
    n_documents: int | None = 2_000_000  # records to read at most, in the source's own order; None: all
    train_rows: int | None = 2_022_400  # 126,400 updates * 16 rows; None: all that the documents give
    val_rows: int = 2_048  # the last rows of the stream, so of the last file; for your own text prefer val_share
    val_share: float = 0.0  # share of documents held out by hash, instead of val_rows
    bos: Literal["auto", "none"] = "auto"  # "auto": before each document the BOS that the tokenizer itself adds, if any
    seq_len: int = 512  # model inputs per row; a stored row has up to seq_len + 1 ids
    shuffle: bool = False  # visit the rows in an order drawn from `seed`, a new one for each pass
    repeat_rows: bool = False  # go through the rows again when the steps ask for more than there are
    mask_after_eos: bool = False  # leave the token after an EOS (the first of a document, or its BOS) out of the loss

    # --- optimisation (paper, appendix D.1)
    max_steps: int = 126_400  # updates of this run; may end before schedule_steps
    schedule_steps: int = 126_400  # updates of the whole schedule, at whose end the rate is min_lr
    batch_rows: int = 16  # rows per update
    micro_batch: int | None = (
        None  # rows per model forward: speed and memory only, never the result; None: what fits the GPU, 1 on the CPU
    )
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
    lr_schedule: Literal["cosine", "wsd", "constant"] = (
        "cosine"  # to min_lr; "wsd": lr stays until the last 10 % of the schedule, then falls linearly to min_lr
    )
    w_kd_schedule: Literal["constant", "wsd"] = (
        "constant"  # "wsd": w_kd rises over 10 % of the schedule and falls in its last 1 %, w_ce = 1 - w_kd
    )

    # --- machine
    device: str = "auto"  # "cpu", "cuda", "cuda:1"; "auto": cuda where there is one, else cpu
    teacher_device: str | None = None  # None: the student's
    dtype: Literal["auto", "float32", "bfloat16"] = (
        "auto"  # of the forward passes; "auto": bfloat16 on cuda, float32 on cpu
    )
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
    hyper: dict = field(
        default_factory=dict, hash=False
    )  # by method, {"alra": {"gamma": 3.0}}; --alra.gamma=3 sets one, --alra@LABEL.gamma=3 that of one student

    def settings_of(self, student: str) -> dict:
        """The settings given to METHOD or METHOD@LABEL; a label's own come on top of its method's."""
        return self.hyper.get(student.partition("@")[0], {}) | self.hyper.get(student, {})

    def overrides_of(self, student: str) -> dict:
        """Those of `settings_of` that are its objective's."""
        return {key: value for key, value in self.settings_of(student).items() if key != "lr"}

    def lr_factor(self, student: str) -> float:
        """What the schedule's rate is multiplied by for this student: by --METHOD.lr=X it is X / lr, from first to last."""
        return self.settings_of(student).get("lr", self.lr) / self.lr

    @property
    def row_len(self) -> int:
        """Ids in a stored row: the inputs and the last target."""
        return self.seq_len + 1

    def __post_init__(self):
        for f in dataclasses.fields(self):
            object.__setattr__(self, f.name, _typed(f.name, getattr(self, f.name), TYPES[f.name]))
        for name, of in self.hyper.items():
            named = isinstance(name, str) and isinstance(of, dict) and all(isinstance(key, str) for key in of)
            _require(named, f'hyper={self.hyper!r}: expected settings by method, like {{"alra": {{"gamma": 3.0}}}}')
            lr = of.get("lr", self.lr)
            number = isinstance(lr, int | float) and not isinstance(lr, bool)
            _require(number and 0 < lr < math.inf, f"{name}.lr={lr!r}: expected a number above 0")
        for name in ("max_steps", "schedule_steps", "batch_rows", "group", "seq_len",
                     "log_every_steps", "val_every_steps", "keep_checkpoints", "shard"):  # fmt: skip
            _require(getattr(self, name) >= 1, f"{name}={getattr(self, name)}: expected at least 1")
        _require(self.batch_rows <= 2**20, f"batch_rows={self.batch_rows}: expected at most {2**20}")
        for name in ("lr", "min_lr", "clip", "adam_eps", "timeout_minutes"):
            _require(getattr(self, name) > 0, f"{name}={getattr(self, name)}: expected more than 0")
        for name in ("weight_decay", "warmup_steps", "val_rows", "seed"):
            _require(getattr(self, name) >= 0, f"{name}={getattr(self, name)}: expected 0 or more")
        for name in (
            "n_documents",
            "train_rows",
            "micro_batch",
            "val_max_rows",
            "histogram_every_steps",
            "checkpoint_every_steps",
        ):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"{name}={value}: expected at least 1, or None")
        minutes = self.checkpoint_every_minutes
        _require(minutes is None or minutes > 0, f"checkpoint_every_minutes={minutes}: expected more than 0, or None")
        for name in ("beta1", "beta2", "val_share"):
            _require(0 <= getattr(self, name) < 1, f"{name}={getattr(self, name)}: expected 0 <= {name} < 1")
        _require(self.methods, "methods=(): expected at least one name")
        for name in self.methods:
            label = name.partition("@")[2] if "@" in name else "x"
            _require(
                re.fullmatch(r"[\w+-][\w.+-]*", label),
                f"methods: {name!r}: expected METHOD or METHOD@LABEL, a label of letters, digits and _ . + -",
            )
        twice = [m for m in self.methods if self.methods.count(m) > 1]
        _require(not twice, f"methods={self.methods}: {twice[:1]} stands there twice; each method has one folder")
        _require(self.min_lr <= self.lr, f"min_lr={self.min_lr}: expected at most lr={self.lr}")
        _require(self.max_steps <= self.schedule_steps,
                 f"max_steps={self.max_steps}: expected at most schedule_steps={self.schedule_steps}, where the learning rate ends")  # fmt: skip
        _require(self.warmup_steps < self.schedule_steps,
                 f"warmup_steps={self.warmup_steps}: expected less than schedule_steps={self.schedule_steps}")  # fmt: skip
        _require(self.batch_rows % self.group == 0,
                 f"group={self.group}: expected a divisor of batch_rows={self.batch_rows}")  # fmt: skip
        _require((self.micro_batch or self.group) % self.group == 0,
                 f"micro_batch={self.micro_batch}: expected a multiple of group={self.group}, so that no forward batch is cut")  # fmt: skip
        _require(self.batch_rows % (self.micro_batch or 1) == 0,
                 f"micro_batch={self.micro_batch}: expected a divisor of batch_rows={self.batch_rows}")  # fmt: skip
        _require(self.shard == 1 or self.teacher_device is None,
                 f"teacher_device={self.teacher_device} with shard={self.shard}: a spread teacher lies on the students' devices; unset it")  # fmt: skip
        _require(not (self.val_rows and self.val_share),
                 f"val_rows={self.val_rows} with val_share={self.val_share}: set one of them to 0")  # fmt: skip


def load(
    argv: list[str], methods: Sequence[str] = (), presets: Callable[[str | None], Sequence[str]] | None = None
) -> "Loaded":
    """Config files and `--key=value` flags, in order -> the config and where each value came from.

    `--help` prints all keys, `methods` where the script has them, and `presets` of students for the teacher that the
    other arguments set, and ends the process.
    Raises `ConfigError` for a file that is not there or does not run, an unknown key, a wrong type or an
    impossible combination.
    """
    values, origin, hyper = {}, {}, {}
    if not argv:
        raise ConfigError("no config: expected one, like config/alra_200m.py, or --KEY=VALUE; --help lists the keys")
    if {"-h", "--help"} & set(argv):
        others = [arg for arg in argv if arg not in ("-h", "--help")]
        teacher = load(others).config.teacher if others else Config.teacher
        print(help_text(sys.modules["__main__"].__doc__ or "", methods, presets(teacher) if presets else ()))
        sys.exit(0)
    for arg in argv:
        if not arg.startswith("--"):
            found = _run_file(arg)
        else:
            key, sep, text = arg[2:].partition("=")
            if "." not in key:
                _known(key, arg)
            if not sep:
                raise ConfigError(f"{arg}: expected --{key}=VALUE")
            method, dot, setting = key.rpartition(".")
            found = {"hyper": {method: {setting: _literal(text)}}} if dot else {key: _parse(arg, text, TYPES[key])}
        for key, value in found.items():
            _known(key, arg)
            if key == "hyper" and isinstance(value, dict) and all(isinstance(of, dict) for of in value.values()):
                for method, of in value.items():  # several sources add up
                    hyper.setdefault(method, {}).update(of)
                value = hyper
            values[key], origin[key] = value, "command line" if arg.startswith("--") else arg
    return Loaded(Config(**values), origin, tuple(argv))


@dataclass(frozen=True)
class Loaded:
    config: Config
    origin: dict = field(default_factory=dict)  # key -> file or "command line"; absent: the default
    argv: tuple[str, ...] = ()


def help_text(about: str, methods: Sequence[str] = (), presets: Sequence[str] = ()) -> str:
    """What `--help` prints: the script's own text, every key with its default, type and comment, presets and methods."""
    lines = [about.strip()]
    for key, (headings, words) in key_comments().items():
        default = Config.__dataclass_fields__[key].default
        default = {} if default is dataclasses.MISSING else default
        value = ",".join(default) if isinstance(default, tuple) else default
        lines += [f"\n{heading}" for heading in headings]
        lines.append(f"    --{key}={value}  ({_name(TYPES[key])}){'  ' if words else ''}{words}")
    lines += ["\n" * (i == 0) + line for i, line in enumerate(presets)]
    lines += ["\nmethods, and the settings of their objectives (--METHOD.SETTING=VALUE; lr too)"] if methods else []
    for line in methods:
        lines += textwrap.wrap(line, 120, initial_indent="    ", subsequent_indent=" " * 8)
    return "\n".join(lines)


def key_comments() -> dict[str, tuple[list[str], str]]:
    """Key -> the headings before it and its comment, from `Config`'s source, so that they are written once."""
    source, found, done = inspect.getsource(Config), {}, 0
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start[0]: t.string.lstrip("#- ") for t in tokens if t.type == tokenize.COMMENT}  # by line
    for node in ast.parse(source).body[0].body:
        if isinstance(node, ast.AnnAssign):
            headings = [comments[n] for n in range(done + 1, node.lineno) if n in comments]
            done = node.end_lineno
            words = " ".join(comments[n] for n in range(node.lineno, done + 1) if n in comments)
            found[node.target.id] = headings, words
    return found


class Heard:
    """stdout or stderr of a script. A reader that goes away (`| head -1`) does not end the run, nor does a character
    that the terminal's encoding lacks."""

    def __init__(self, stream: typing.TextIO | None):
        self.stream = stream or io.StringIO()  # it was closed before the script began
        if isinstance(self.stream, io.TextIOWrapper):
            self.stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def write(self, text: str) -> None:
        self._try(self.stream.write, text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, do: Callable, *args) -> None:
        try:
            do(*args)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


def guard(main: Callable[[], int | None]) -> int:
    """Run a script's `main` -> its exit code. An error that a user can mend is one line, without a traceback.

    So is Ctrl-C, with the exit code that a shell gives it.
    """
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(Heard, streams)
    try:
        code = main() or 0
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except (ValueError, OSError, SafetensorError, MemoryError, OverflowError, RuntimeError) as error:
        memory = isinstance(error, RecursionError) or "alloc" in str(error)  # a library says so with a RuntimeError
        if isinstance(error, RuntimeError) and not memory:
            raise
        text = str(error) if isinstance(error, UserError) else first_line(error)
        print(f"{type(error).__name__}: {text}", file=sys.stderr)
        return 1
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        sys.stdout, sys.stderr = streams


def save(loaded: Loaded, path: Path, **facts) -> None:
    """The resolved config, where each value came from, and further facts of the run, as JSON."""
    values = dataclasses.asdict(loaded.config)
    origin = {key: loaded.origin.get(key, "default") for key in values}
    write_json(path, {"config": values, "origin": origin, **facts})


def _run_file(path: str) -> dict:
    """The public names that a config file assigns."""
    if not path.endswith(".py"):
        raise ConfigError(f"{path}: expected a config file (*.py) or --key=value")
    if not Path(path).is_file():
        near = nearest(path, map(str, Path(path).parent.glob("*.py")))
        raise ConfigError(f"{path}: no such config file" + (f", did you mean {near}?" if near else ""))
    names: dict = {}
    try:
        exec(compile(Path(path).read_text(), path, "exec"), names)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{path}: does not run: {type(error).__name__}: {error}") from error
    return {k: v for k, v in names.items() if not k.startswith("_") and not isinstance(v, types.ModuleType)}


def _known(key: str, where: str) -> None:
    """ConfigError for an unknown key. For a setting of a method it says how to set it."""
    if key in TYPES:
        return
    if key in RENAMED:
        raise ConfigError(f"{where}: {key!r} is called {RENAMED[key]!r} now")
    from losses import METHODS, keywords  # imported here: it takes a second, and only this error needs it

    owners = {setting: name for name in reversed(METHODS) for setting in keywords(name)}
    near = nearest(key, [*TYPES, *owners])
    if not near:  # a key whose comment has these words
        near = next((k for k, (_, words) in key_comments().items() if key.replace("_", " ") in words), None)
    setting = key if key in owners else near
    hint = "" if key in owners else f", did you mean {near!r}?" if near else "; configure.py lists them all"
    if setting in owners:
        hint += f"{'' if hint else ';'} settings belong to a method: --{owners[setting]}.{setting}=VALUE"
    raise ConfigError(f"{where}: no such key {key!r}{hint}")


def _literal(text: str) -> object:
    """The text as a Python literal if it is one, else unchanged."""
    try:
        return ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, SyntaxError):
        return text


def _parse(arg: str, text: str, kind) -> object:
    """The text after `--key=` as a value: a str where the key takes one, a Python literal elsewhere."""
    if text in ("None", "none") and type(None) in typing.get_args(kind):
        return None
    if kind == tuple[str, ...]:
        return tuple(part for part in text.split(",") if part)
    if str in _members(kind):
        return text
    value = _literal(text)
    if isinstance(value, str):
        raise ConfigError(f"{arg}: expected {_name(kind)}, got {text!r}")
    return value


def _typed(key: str, value: object, kind) -> object:
    """`value` as its field's type. An int converts to a float; nothing else converts."""
    for member in _members(kind):
        if typing.get_origin(member) is tuple:
            if isinstance(value, (tuple, list)) and all(isinstance(v, str) for v in value):
                return tuple(value)
        elif isinstance(value, member) and not (member is int and isinstance(value, bool)):
            if isinstance(value, int | float) and not abs(value) < 2**53:
                raise ConfigError(f"{key}={value}: expected a finite number below 2**53")
            choices = [c for k in _kinds(kind) if typing.get_origin(k) is Literal for c in typing.get_args(k)]
            if not choices or value in choices or value is None:
                return value
        elif member is float and isinstance(value, int) and not isinstance(value, bool):
            return _typed(key, float(value), kind)
    raise ConfigError(f"{key}={value!r}: expected {_name(kind)}, got {type(value).__name__}")


def _kinds(kind) -> tuple:
    """`int | None` -> (int, NoneType)."""
    return (
        typing.get_args(kind)
        if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
        else (kind,)
    )


def _members(kind) -> list[type]:
    """The classes that a field's values may have."""
    return [str if typing.get_origin(k) is Literal else k for k in _kinds(kind)]


def _name(kind) -> str:
    """A type in words."""
    words = []
    for k in _kinds(kind):
        literal = typing.get_origin(k) is Literal
        words += (
            [repr(c) for c in typing.get_args(k)]
            if literal
            else ["None" if k is type(None) else getattr(k, "__name__", str(k))]
        )
    return "names, comma-separated" if kind == tuple[str, ...] else " or ".join(words)


def _require(ok, message: str) -> None:
    if not ok:
        raise ConfigError(message)


TYPES = typing.get_type_hints(Config)
