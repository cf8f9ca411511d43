"""What a run prints, and what it writes into log.jsonl."""

import os
import sys
import time

import torch
from tqdm import tqdm

from lib import files, metrics, parallel
from lib.device import mfu, peak_bytes
from lib.errors import UserError, first_line
from run.methods import scheduled_settings
from run.students import n_validated
from run.teacher import teacher_flops

# What an entry of log.jsonl has besides an objective's terms, moving settings and modules, and the
# figures of validations.
LOGGED = (
    "step",
    "nominal_tokens",
    "valid_tokens",
    "lr",
    "gnorm",
    "tok_per_sec",
    "mfu",
    "mem_gib",
    "wait_sec",
    "save_sec",
    "eta_sec",
    "time",
)

# what is printed with the name and unit that it has in tables
PRINTED = {"val_agree": "top-1 agreement {:.2%}"}


def say(text):
    """Print on the first process, above the progress bar."""
    if parallel.rank() != 0:
        return
    try:
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()
    except OSError:
        # Nobody reads the pipe any more: Ctrl-C ends `| tee` too. Go on without output, so that the
        # checkpoint is written.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def say_values(label: str, values):
    """Print a line for each student."""
    for name, terms in values.items():
        cells = [PRINTED.get(key, f"{key} {{:.4f}}").format(x) for key, x in terms.items()]
        say(f"{label}  |  {name}  {'  '.join(cells)}")


def log_terms(live, teacher, rate: float, run):
    """Write an entry for each student, with means over all tokens since the last entry.

    Gradient norm, moving settings and what a method's modules hold are those of the last update.

    rate  the schedule's learning rate in the last update
    """
    cfg = run.cfg
    device = torch.device(cfg.device)
    now = time.perf_counter()
    n_timed = max(run.step - run.first_step - 1, 1)  # all but the first update
    sec_left = (now - run.began) / n_timed * (cfg.max_steps - run.step)
    # of everything since the last entry: updates, validations, checkpoints
    n_rows = (run.step - run.logged_step) * cfg.batch_rows
    tok_per_sec = n_rows * cfg.seq_len / (now - run.logged_at)
    # a backward pass has twice the FLOPs of a forward pass
    flops = sum(3 * s.model.config.flops_per_token(cfg.seq_len) for s in live)
    if teacher and not teacher.is_stored and teacher.device == device:
        flops += teacher_flops(cfg.teacher, cfg.seq_len)
    utilisation = mfu(tok_per_sec * flops, device, parallel.world())
    machine = {
        "tok_per_sec": tok_per_sec,
        "mfu": utilisation,
        "mem_gib": max(parallel.all_gather(peak_bytes(device))) / 2**30,  # of any process
        "wait_sec": run.wait_sec,
        "save_sec": run.save_sec,
        "eta_sec": sec_left,
    }
    n_tokens = max(run.since_log_tokens, 1)
    means = {}
    for s in live:
        means[s.name] = {name: value / n_tokens for name, value in s.totals().items()}
        # what is one number of a method's modules, such as a temperature that it learns
        extras = {key: x.item() for key, x in s.extras.state_dict().items() if x.numel() == 1}
        values = {
            "step": run.step,
            "nominal_tokens": run.step * cfg.batch_rows * cfg.seq_len,
            "valid_tokens": run.valid_tokens,
            **means[s.name],
            **scheduled_settings(s.method, run.step - 1, cfg.schedule_steps),
            **extras,
            "lr": rate * (cfg.lr_of(s.name) / cfg.lr),
            "gnorm": s.gnorm,
        }
        add_entry(s, values | machine)
        s.sums.clear()
    label = f"{time.strftime('%T')}  step {run.step}/{cfg.max_steps}  lr {rate:.1e}"
    label += f"  {tok_per_sec:8,.0f} tok/s"
    if utilisation:
        label += f"  mfu {utilisation:.0%}"
    label += f"  eta {tqdm.format_interval(sec_left):>8}"
    say_values(label, means)
    run.since_log_tokens = 0
    run.wait_sec = 0.0
    run.save_sec = 0.0
    run.logged_step = run.step
    run.logged_at = now


def log_validation(live, validated, val, run):
    """Print and log the results of a validation, the first time with the reference CEs.

    val  the held-out rows (`Rows`)
    """
    references = {f"val_{key}": ce for key, ce in val.reference_ces.items()}
    n_rows = n_validated(val, run.cfg)
    say_values(f"step {run.step}, {n_rows:,} held-out rows", validated)
    if run.step <= run.first_step + run.cfg.val_every_steps:
        say_reference_ces(validated[live[0].name] | references)
    for s in live:
        figures = validated[s.name] | references
        add_entry(s, {"step": run.step} | figures)
        ce = figures["val_ce"]
        uniform = figures["val_uniform_ce"]
        if not ce < uniform:
            say(
                f"{s.name}, step {run.step}: held-out CE {ce:.2f} exceeds ln V = {uniform:.2f}, "
                "that of a uniform guess; if it was lower before, try a smaller lr"
            )
        if run.step == run.cfg.max_steps:
            say(verdict(s.name, figures))


def verdict(name, values) -> str:
    """Return where a student stands between the CEs of token frequencies and of its teacher."""
    ce = values["val_ce"]
    below = values.get("val_unigram_ce", values["val_uniform_ce"]) - ce
    side = "below" if below > 0 else "above"
    text = f"{name}: held-out CE {ce:.2f}, {abs(below):.2f} {side} the unigram CE"
    if "val_teacher_ce" in values:
        text += f" and {ce - values['val_teacher_ce']:.2f} above the teacher's"
    return text + (": it learns" if below > 0.25 else ": train longer (docs/learning.md)")


def say_reference_ces(values: dict[str, float]):
    """Print the reference CEs. Warns if the teacher is worse than a unigram model."""
    references = {key.removeprefix("val_"): value for key, value in values.items()}
    say(f"held-out {metrics.reference_text(references)}")
    # rows files of older versions lack unigram_ce
    teacher_ce = references.get("teacher_ce", 0)
    if teacher_ce > references.get("unigram_ce", references["uniform_ce"]):
        say(
            f"warning: the teacher's held-out CE is {teacher_ce:.2f}, worse than a unigram model, "
            "so a low KL to it means little"
        )


def add_entry(s, values: dict):
    """Add an entry to a student's log, with None for a value that is not finite."""
    values = files.for_json(values) | {"time": time.strftime("%FT%T%z")}
    append(s.folder / "log.jsonl", values)
    for service, connect in list(s.services.items()):
        try:
            connect()(values)
        except Exception as error:  # whatever it is, log.jsonl has the entry
            why = first_line(error)
            say(f"{s.name}: left out {service} from step {values['step']} on: {why}")
            del s.services[service]


UNWRITTEN = []  # (path, line): lines that a full disk keeps out of their files


def append(path, line: dict):
    """Add a line to a JSON lines file, on the first process.

    If the file cannot be written, as on a full disk, the line waits for the next call.
    """
    if parallel.rank() != 0:
        return
    UNWRITTEN.append((path, line))
    try:
        write_waiting()
    except UserError as error:
        if len(UNWRITTEN) == 1:  # say it once
            say(str(error))


def write_waiting():
    """Write the lines that wait. Raises `UserError` if a file cannot be written."""
    while UNWRITTEN:
        files.append_line(*UNWRITTEN[0])
        UNWRITTEN.pop(0)
