"""What a run opens and checks before its first update, and the facts that its results carry."""

import dataclasses
import math
import sys

import torch
from transformers import PreTrainedTokenizerFast

from lib import parallel
from lib.device import machine_facts, pick_device
from lib.errors import UserError
from lib.hf import load_tokenizer, pinned, tokenizer_hash
from lib.rows import Rows
from lib.source import hashes, loaded_sources
from losses import resolve
from run.checkpoints import branch_point
from run.log import say
from run.methods import compute_dtype
from run.objective_trial import check_settings
from run.provenance import made_by, student_shape
from run.students import n_validated
from run.teacher import (
    Teacher,
    check_context,
    check_ids,
    check_teacher,
    check_vocabulary,
    compile_layers,
    load_teacher,
)


def open_data(cfg, name) -> Rows:
    vocab_size = student_shape(cfg).vocab_size
    rows = Rows(cfg.data_dir, name, cfg.seq_len, cfg.mask_after_eos, vocab_size)
    rows.mask_documents = cfg.mask_documents
    if cfg.resume_from and name == "train":
        # a branch goes on with the rows of the run that it leaves; other rows begin at row 0
        _, state = branch_point(cfg.resume_from)
        has_same_rows = state["made_by"].get("data_sha256") == rows.manifest["sha256"]
        rows.first_row_step = state["first_row_step"] if has_same_rows else state["step"]
    return rows


def uses_teacher(cfg) -> bool:
    """Return whether a method learns from a teacher. Raises `UserError` if `teacher` is None."""
    taught = [name for name in cfg.methods if resolve(name).has_teacher]
    if taught and not cfg.teacher:
        raise UserError(f"teacher=None: {taught[0]} learns from one; set a local folder or hub id")
    return bool(taught)


def open_teacher(cfg, rows, val):
    """Return the frozen `Teacher`, or a `CachedTeacher`; None if no method of the run needs one.

    rows, val  training and held-out rows, whose hidden states `teacher_cache` stores
    """
    if not uses_teacher(cfg):
        return None
    output_device = torch.device(cfg.device)
    device = output_device
    if cfg.teacher_device:
        device = pick_device(cfg.teacher_device, "teacher_device")
    dtype = compute_dtype(cfg)

    def load() -> Teacher:
        teacher = load_teacher(cfg.teacher, dtype, device, output_device, rows, cfg.shard)
        if cfg.compile:
            compile_layers(teacher.model)
        return teacher

    if not cfg.teacher_cache:
        return load()
    from run.teacher_cache import open_cached, rows_of_run  # few runs need it

    wanted = rows_of_run(cfg, rows, val)
    return open_cached(cfg.teacher, dtype, output_device, wanted, load, cfg.micro_batch)


def check_config(cfg):
    """Check the config before any data is read. Raises `UserError`."""
    # texts name devices and paths, which may differ, are used by one process alone, or are in what
    # `run_facts` compares
    shared = {key: value for key, value in vars(cfg).items() if not isinstance(value, str)}
    parallel.check_agreement(**shared)
    world = parallel.world()
    if cfg.batch_rows % (world * cfg.group):
        raise UserError(
            f"{world} processes with group={cfg.group}: "
            f"expected their product to divide batch_rows={cfg.batch_rows}"
        )
    if world % cfg.shard:
        raise UserError(f"shard={cfg.shard}: expected a divisor of the {world} processes")
    uses_teacher(cfg)
    shape = student_shape(cfg)  # may download the teacher
    in_parts = cfg.group * cfg.seq_len != positions_at_once(cfg)
    for name in cfg.methods:
        check_settings(name, shape.vocab_size, in_parts, **cfg.overrides_of(name))
    check_context(f"student={cfg.student}", shape.max_position_embeddings, cfg.seq_len)


def positions_at_once(cfg) -> int:
    """Return `chunk_positions`, or its default if that is None.

    On a GPU this is the largest power of two of which logits [N, V] in fp32 take at most 1.28 GB:
    2,048 at V = 151,936. Elsewhere it is one forward batch, whose bits then do not depend on the
    number of rows at a time.
    """
    default = min(cfg.group * cfg.seq_len, 512)
    if cfg.device.startswith("cuda"):
        default = 2 ** int(math.log2(320e6 / student_shape(cfg).vocab_size))
    return cfg.chunk_positions or default


def checked_tokenizer(cfg, rows, val) -> PreTrainedTokenizerFast:
    """Return the tokenizer, once rows, tokenizer, vocabularies and updates fit each other."""
    name = cfg.tokenizer_name()
    tokenizer = load_tokenizer(name)
    if uses_teacher(cfg):
        check_teacher(cfg.teacher, tokenizer, cfg.seq_len)
    check_vocabulary(f"student={cfg.student}", student_shape(cfg).vocab_size, tokenizer)
    check_rows(cfg.data_dir, rows, val, name, tokenizer)
    if cfg.student_weights:
        # which may lack a token, unlike a teacher
        check_ids("student_weights", cfg.student_weights, tokenizer, may_lack=True)
    check_number_of_rows(cfg, rows)
    say_precision(cfg, val)
    return tokenizer


def check_rows(folder, rows, val, name, tokenizer):
    """Check that both rows files were prepared together, and with this tokenizer."""
    for key in ("tokenizer_sha256", "vocab_size", "eos_id", "bos"):
        if rows.manifest.get(key) != val.manifest.get(key):
            raise UserError(f"{folder}: {key} differs in train.json and val.json; prepare again")
    if rows.manifest["sha256"] == val.manifest["sha256"]:
        raise UserError(f"{folder}: val.bin has the rows of train.bin; prepare it again")
    eos = rows.manifest["eos_id"]
    if eos != tokenizer.eos_token_id:
        raise UserError(
            f"{folder}: eos_id={eos}, the tokenizer has {tokenizer.eos_token_id}; prepare it again"
        )
    if rows.manifest["tokenizer_sha256"] != tokenizer_hash(tokenizer):
        raise UserError(f"tokenizer {name}: not the one that {folder} was prepared with")


def check_number_of_rows(cfg, rows):
    needed = (cfg.max_steps - rows.first_row_step) * cfg.batch_rows
    if needed > rows.n and not cfg.repeat_rows:
        remedy = "set --repeat_rows=True, or prepare more rows"
        n_steps = rows.first_row_step + rows.n // cfg.batch_rows
        if n_steps:
            shorter = f"--max_steps={n_steps} --schedule_steps={n_steps}"
            if cfg.warmup_steps > n_steps // 2:
                shorter += f" --warmup_steps={n_steps // 10}"
            remedy = f"set {shorter}, or {remedy}"
        raise UserError(
            f"max_steps={cfg.max_steps}: needs {needed:,} rows, "
            f"{cfg.data_dir} has {rows.n:,}; {remedy}"
        )
    say(
        f"{cfg.data_dir}: {needed // cfg.batch_rows:,} updates of {cfg.batch_rows} rows are "
        f"{needed / rows.n:,.2f} passes over {rows.n:,} rows"
    )


def say_precision(cfg, val):
    """Warn if there are too few held-out rows to tell close methods apart."""
    n_rows = n_validated(val, cfg)
    # half of a 95 % interval; the manifest's is over all held-out rows
    half = val.manifest.get("unigram_half", 0)
    if half is None:
        say(f"{n_rows:,} held-out rows are too few to tell methods apart")
    elif (half := half * math.sqrt(val.n / n_rows)) > 0.1:
        say(
            f"{n_rows:,} held-out rows give a CE to about ± {half:.2f} nats (95 % over rows): "
            "too few to tell close methods apart"
        )


def run_facts(cfg, rows, val) -> dict:
    """Return the provenance of every result of the run, with each student's `made_by`.

    Raises `UserError` if the processes do not agree on the records (run/provenance.py), the
    held-out rows or the code.
    """
    records = {name: made_by(cfg, name) for name in cfg.methods}
    held_out = {"val_sha256": val.manifest["sha256"]}
    for facts in (hashes(loaded_sources()), held_out, *records.values()):
        parallel.check_agreement(**facts)
    teachers = ",".join(map(pinned, cfg.teacher.split(","))) if uses_teacher(cfg) else None
    return {
        "config": dataclasses.asdict(cfg),
        "argv": sys.argv[1:],
        "made_by": records,
        **held_out,
        "bos": rows.manifest["bos"],  # the id before each document, if any
        "first_row_step": rows.first_row_step,
        "teacher_used": teachers,
        **machine_facts(torch.device(cfg.device)),
    }
