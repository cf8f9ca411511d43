"""Score checkpoints: nine tasks through lm-eval, and figures (CE, KL, ..) over held-out rows.

    python eval.py out/alra_200m --data_dir data/eval           # all students of the run
    python eval.py out/demo --tasks none                        # only the figures over val.bin
    python eval.py --table out/*                                # a table of earlier results
    python eval.py --table out/alra_200m --metric acc_norm      # with acc_norm where a task has it

The folder of a run stands for its students. A student that is still in training is scored at its
newest checkpoint. Results are appended to results.jsonl: a student's in its own folder, those of a
checkpoint or of any other model in out/eval/NAME. The command prints tables of what it has scored.
Prompts, choices and metrics are those of lm-eval's own task files; lib/tasks.py reads and checks
the items.

Dimension key: B batch, T time, N positions, V vocabulary, D width.
"""

import argparse
import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import configure
from lib.errors import UserError, note
from lib.tasks import NO_STORYCLOZE, SUITES, OpenTask, choose_tasks, open_task


def arguments(argv) -> argparse.Namespace:
    p = argparse.ArgumentParser(description="Score checkpoints, or tabulate earlier results.")
    add = p.add_argument
    add(
        "paths", nargs="+", metavar="PATH", help="out/NAME, out/NAME/METHOD, model folder or hub id"
    )
    add("--tasks", default="all", help="all, none, or names with commas")
    add("--split", default="heldout", choices=SUITES, help="paper's item set")
    add("--data_dir", help="folder with items as TASK/SPLIT.jsonl; default: the hub")
    add("--storycloze", help="your copy of StoryCloze: the CSV of its authors")
    add("--any_items", action="store_true", help="also score items that are not the published ones")
    add("--limit", type=int, help="first N items of each task")
    add("--rows", help="folder with val.bin, or none; default: the run's data_dir")
    add("--max_rows", type=int, default=512, help="number of held-out rows")
    add("--skip_rows", type=int, default=0, help="first rows to leave out, such as those of trials")
    add("--teacher", help="teacher for KL and agreement, or none; default: the run's")
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the decoder")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    add("--batch_tokens", type=int, default=4096, help="per forward pass; affects speed and memory")
    add("--max_length", type=int, default=512, help="longer requests lose their beginning")
    add("--out", help="folder; default: the student's, out/eval/NAME for other models")
    add("--table", action="store_true", help="only print the tables of earlier results")
    add("--reference", default="pretrain", help="method that differences start from")
    add("--metric", default="acc", choices=("acc", "acc_norm"), help="that tables show")
    args = p.parse_args(argv)
    args.names = choose_tasks(args.tasks, args.split)
    for key, least in {"limit": 2, "max_rows": 1, "skip_rows": 0, "max_length": 1}.items():
        value = getattr(args, key)
        if value is not None and value < least:
            raise UserError(f"--{key} {value}: expected at least {least}")
    return args


if __name__ == "__main__":
    configure.check_flags(arguments)

import lm_eval
import numpy as np
import torch
from lm_eval.api.model import TemplateLM

from lib import metrics
from lib.device import machine_facts, pick_device
from lib.files import append_line, for_json, text_hash, writing
from lib.rows import PAD, Rows, read_manifest
from lib.source import hashes, loaded_sources
from lib.stats import half_interval
from lib.tokens import token_bytes
from lib.vocab import IGNORE
from run.provenance import content_hash
from run.results import has_model, students_of
from run.saved_models import Checkpoint, check_content, open_checkpoint
from run.teacher import Teacher, check_context, check_teacher, inherited, load_teacher
from run.teacher_cache import open_cached, progress


def score(args):
    """Score all checkpoints and print their tables. Results are written as they are computed."""
    device = pick_device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels of extensions run on the current card
    torch.backends.cuda.enable_cudnn_sdp(False)  # it would plan each shape of a batch anew
    names = args.names
    if args.tasks == "all" and "storycloze_2016" in names and not args.storycloze:
        names.remove("storycloze_2016")
        note(NO_STORYCLOZE)
    checkpoints = [*open_checkpoints(args)]  # a missing one must show before the hub is asked
    if names and not args.data_dir:  # which may take minutes to fail
        note("asks the hub for the items of tasks; without a network: --tasks none")
    tasks = {
        name: open_task(name, args.split, args.data_dir, args.storycloze, args.any_items)
        for name in names
    }
    data_dir = shared_setting(args.rows, "data_dir", checkpoints)
    if not names and not data_dir:
        raise UserError(
            "--tasks none and no rows: nothing to score; name a folder with val.bin by --rows DIR"
        )
    for c in checkpoints:
        if names and args.max_length > c.context:
            raise UserError(f"--max_length {args.max_length}: {c.name} takes {c.context} at most")
        file = c.results / "results.jsonl"
        with writing(file):  # before anything is computed
            c.results.mkdir(parents=True, exist_ok=True)
            file.open("a").close()
            if not file.stat().st_size:
                file.unlink()
    results = []
    if data_dir:
        results += score_rows(checkpoints, data_dir, args, device)
    if tasks:
        for c in checkpoints:
            results += score_tasks(c, tasks, args, device)
    from run.tables import tables_of  # imports pandas, which takes a second

    try:
        print(tables_of(results, args.reference, args.metric))
    except UserError as error:  # the results are written
        print(f"no table: {error}")
    for result in results:
        if "error" in result:
            raise result["error"]


# ----------------------------------------------------------------------------------------------
# the tasks


def score_tasks(c: Checkpoint, tasks: dict[str, OpenTask], args, device) -> Iterator[dict]:
    """Write and yield a checkpoint's scores, a result for each task."""
    model = load_teacher(c.folder, getattr(torch, args.dtype), device)
    scorer = Scorer(model, c.tokenizer, args.max_length, args.batch_tokens, c.bos)
    protocol = {
        "dtype": args.dtype,
        "lm_eval": lm_eval.__version__,
        "max_length": args.max_length,
        "limit": args.limit,
    }
    for name, task in tasks.items():
        try:
            scores = benchmark(scorer, name, task, args)
        except UserError as error:
            raise UserError(f"{name}: {error}; --tasks can leave out the task") from error
        yield write(args.split, {name: scores}, protocol, {}, c, device)


class Scorer(TemplateLM):
    """lm-eval's view of a model: log-likelihoods equal to those of its own Hugging Face backend.

    Each request is one row; a batch has rows of equal length. The head runs only where a
    continuation is scored, in fp32.

    bos  the id before each context, as before each document in training, or None
    """

    # none of the nine tasks asks for these, but for the first: it replaces an empty context
    prefix_token_id = eot_token_id = generate_until = loglikelihood_rolling = None

    def __init__(self, model, tokenizer, max_length=512, batch_tokens=4096, bos=None):
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.batch_tokens = batch_tokens
        self.bos = bos
        self.prefix_token_id = tokenizer.eos_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens=None) -> list[int]:
        """Return the ids of a text, with the BOS first if there is one."""
        ids = self.tokenizer.backend_tokenizer.encode(string, add_special_tokens=False).ids
        if self.bos is None or add_special_tokens is False:
            return ids
        return [self.bos, *ids]

    def _loglikelihood_tokens(self, requests, **kwargs):
        """Return each continuation's log-probability in nats, and whether it is the greedy one.

        requests  [((context, continuation), context ids, continuation ids)]

        Where a token spans the end of the context, the continuation is what follows that token.
        """
        rows = []  # inputs and labels, the last that fit
        for (context, continuation), context_ids, ids in requests:
            is_whole = context_ids and 0 < len(ids) <= self.max_length
            if not (is_whole and continuation.strip()):
                raise UserError(
                    f"{continuation!r:.60} after {context[-40:]!r} has no score: expected words of "
                    f"1 to {self.max_length} tokens of their own, and a token before them"
                )
            inputs = (context_ids + ids)[:-1]
            labels = [IGNORE] * (len(context_ids) - 1) + ids
            rows.append((tuple(inputs[-self.max_length :]), tuple(labels[-self.max_length :])))
        # Longest first: a batch that does not fit in memory fails at once.
        unique = sorted(set(rows), key=lambda row: (len(row[0]), row), reverse=True)
        model = (lambda x: self.model.hidden(x).float(), self.model.head)
        (sums,) = metrics.sums_by_part([model], None, self.batches(unique), len(unique))
        logp = (-sums["ce"]).tolist()
        is_greedy = (sums["right"] == sums["n"]).tolist()
        scores = dict(zip(unique, zip(logp, is_greedy, strict=True), strict=True))
        return [scores[row] for row in rows]

    def batches(self, rows):
        """Yield rows, sorted by length, as batches of `metrics.sums_by_part`: a part is a row."""
        device = self.model.head.device
        batches = []
        for length, group in itertools.groupby(rows, lambda row: len(row[0])):
            batches += torch.tensor([*group]).split(max(1, self.batch_tokens // length))
        first = 0
        for batch in progress(batches, "scoring", disable=None):
            x, y = batch.to(device).unbind(1)  # [B, T]
            part = torch.arange(first, first + len(x), device=device)
            yield part[:, None].expand_as(x), x, y, None
            first += len(x)


def benchmark(lm: TemplateLM, name: str, task: OpenTask, args) -> dict:
    """Return the metrics of a task, standard errors, n, and the hashes of what was scored."""
    os.environ["DISABLE_MULTIPROC"] = "1"  # lm-eval's bootstrap would fork a process with threads
    out = lm_eval.evaluate(lm, task.loaded, args.limit, bootstrap_iters=1_000, log_samples=False)
    values = {}
    for key, value in out["results"][name].items():
        if key.endswith(",none") and value != "N/A":  # a single item has no standard error
            values[key.removesuffix(",none")] = value
    instances = task.loaded["tasks"][name].instances
    prompts = "".join(json.dumps(instance.args) for instance in instances)
    return {
        **values,
        "n": out["n-samples"][name]["effective"],
        **task.facts,
        "prompts_sha256": text_hash(prompts),
        "version": out["versions"][name],
    }


# ----------------------------------------------------------------------------------------------
# held-out rows


def score_rows(checkpoints: list[Checkpoint], data_dir: str, args, device) -> list[dict]:
    """Write and return figures over held-out rows. The teacher is computed once for all."""
    teacher_name = shared_setting(args.teacher, "teacher", checkpoints)
    rows = open_scored_rows(data_dir, checkpoints, teacher_name, args)
    index = np.arange(rows.n)[args.skip_rows :][: args.max_rows]
    if not len(index):
        raise UserError(f"--skip_rows {args.skip_rows}: {data_dir} has {rows.n} held-out rows")
    ids = rows.read(index)
    tokenizer = checkpoints[0].tokenizer
    references = rows.reference_ces | {"n_rows": len(index), "skip_rows": args.skip_rows}
    protocol = {
        "rows": f"{args.skip_rows:,} to {index[-1]:,} of {data_dir}",
        "teacher": teacher_name,
        "dtype": args.dtype,
        "mask_documents": rows.mask_documents or None,  # None is in no table
    }
    scored = {
        "rows_sha256": hashlib.sha256(ids.tobytes()).hexdigest(),
        "vocabulary": rows.n_vocab,
    }
    dtype = getattr(torch, args.dtype)
    teacher = None
    if teacher_name:
        check_teacher(teacher_name, tokenizer, rows.manifest["row_len"] - 1)
        references["teacher"] = teacher_name
        scored["teacher_sha256"] = sha256 = content_hash(teacher_name)
        for c in checkpoints:
            if not args.teacher:
                check_content(teacher_name, "teacher_sha256", sha256, c.run)
        teacher = open_cached(teacher_name, dtype, device, {rows: index})
        teacher = teacher or load_teacher(teacher_name, dtype, device, rows=rows)
    n_bytes = byte_lengths(tokenizer, rows.n_vocab, ids).to(device)
    models = [load_teacher(c.folder, dtype, device, rows=rows) for c in checkpoints]
    figures = over_rows(models, teacher, rows, index, n_bytes, args.batch_tokens)
    return [
        write("figures", values | references, protocol, scored, c, device)
        for c, values in zip(checkpoints, figures, strict=True)
    ]


def open_scored_rows(data_dir: str, checkpoints: list[Checkpoint], teacher_name, args) -> Rows:
    """Return the held-out rows, with the smallest vocabulary: that of others is padded.

    Raises `UserError` if a checkpoint has another tokenizer or BOS than the rows, or cannot take
    their length.
    """
    seq_len = read_manifest(data_dir, "val")["row_len"] - 1
    n_vocab = min(c.n_vocab for c in checkpoints)
    n_vocab = min(n_vocab, inherited(teacher_name).get("vocab_size", n_vocab))
    rows = Rows(data_dir, "val", seq_len, False, n_vocab)
    rows.mask_documents = bool(shared_setting(None, "mask_documents", checkpoints))
    bos = rows.manifest["bos"]
    for c in checkpoints:
        if not args.rows:
            check_content(data_dir, "val_sha256", rows.manifest["sha256"], c.run)
        if rows.manifest["tokenizer_sha256"] != c.tokenizer_sha256:
            raise UserError(
                f"{data_dir}: rows of another tokenizer than that of {c.name}; prepare some with "
                "that one"
            )
        if c.run and bos != c.bos:
            raise UserError(
                f"{data_dir}: rows with bos={bos}, but {c.name} was trained on rows with "
                f"bos={c.bos}"
            )
        check_context(c.name, c.context, seq_len)
    return rows


def over_rows(
    students: list[Teacher], teacher, rows, index, n_bytes, batch_tokens
) -> Iterator[dict]:
    """Yield the figures of each student, and the number of targets.

    KEY_half is half of a figure's 95 % interval over the documents, None if there are too few;
    "documents" has the number of targets of each document, and its sums of CE and KL.

    index    numbers of the rows to read
    n_bytes  [V] bytes of text that a token stands for. A BOS and an EOS are targets like any other
             but have no text: bits per byte leave them out.
    """
    device = students[0].head.device
    per_batch = max(1, batch_tokens // rows.manifest["row_len"])

    documents = torch.from_numpy(rows.documents(index))  # [rows, T] the document of each label

    def batches():
        for first in progress(range(0, len(index), per_batch), "held-out rows"):
            part = slice(first, first + per_batch)
            x, y = rows.batch(index[part], device)
            h_t = teacher.hidden(x, rows, index[part]) if teacher else None
            yield documents[part].to(device), x, y, h_t

    models = [(model.hidden, model.head) for model in students]
    head_t = teacher.head if teacher else None
    n_documents = int(documents.max()) + 1
    for sums in metrics.sums_by_part(models, head_t, batches(), n_documents, n_bytes):
        sums = {key: value.cpu().numpy() for key, value in sums.items()}
        totals = {key: value.sum(0) for key, value in sums.items()}
        if not totals["n"]:
            raise UserError("the chosen held-out rows have no targets; choose others")
        if not np.isfinite(totals["ce"] + totals.get("kl", 0.0)):
            raise UserError(
                "the probability of a held-out token is 0 or not a number; the weights have "
                "diverged"
            )
        figures = metrics.figures(totals) | {"n_targets": int(totals["n"])}
        for key in metrics.MEANS:
            if key in sums:
                figures[f"{key}_half"] = half_interval(sums[key], sums["n"])
        figures = for_json(figures)
        figures["documents"] = {key: sums[key].tolist() for key in ("n", "ce", "kl") if key in sums}
        yield figures


def byte_lengths(tokenizer, n_vocab: int, ids: np.ndarray) -> torch.Tensor:
    """Return the bytes of text that each token stands for [V]: 0 for special tokens and padding.

    ids  [rows, row_len] to score. At the beginning of a document, a token of a space and a word
         stands for one byte less if the tokenizer adds a space to every text. The result has
         the means over these rows
    """
    pieces = token_bytes(tokenizer)
    lengths = [*map(len, pieces)] + [0.0] * (n_vocab - len(pieces))
    bare, spaced = (tokenizer.encode(text, add_special_tokens=False) for text in ("a", " a"))
    if pieces[bare[0]].startswith(b" ") and bare != spaced:
        begins = np.isin(ids[:, :-1], [tokenizer.eos_token_id, tokenizer.bos_token_id])
        targets = ids[:, 1:]
        for token in {*targets[begins]} - {PAD}:
            if pieces[token].startswith(b" "):
                lengths[token] -= begins[targets == token].mean()
    return torch.tensor(lengths)


# ----------------------------------------------------------------------------------------------
# checkpoints and their results


def open_checkpoints(args) -> Iterator[Checkpoint]:
    """Yield the checkpoints that the command's paths stand for."""
    folders = students_of(args.paths, has_model)
    for path in args.paths:
        for log in sorted(Path(path).glob("*/log.jsonl")):
            if log.parent not in folders:
                note(f"{log.parent}: left out (it stopped, or has no checkpoint yet)")
    for folder in folders:
        c = open_checkpoint(str(folder))
        if c.run and c.results != c.folder.parent:
            note(f"{folder}: scoring the checkpoint {c.folder.parent}")
        yield c._replace(results=Path(args.out or c.results))


def shared_setting(value: str | None, key: str, checkpoints: list[Checkpoint]) -> str | None:
    """Return the value of a flag, or else the setting of the runs, which must agree.

    None stands for a setting that no run has, and for "none".
    """
    if value:
        return None if value == "none" else value
    default = getattr(configure.Config, key)  # of runs that are older than the key
    values = {c.run["config"].get(key, default) for c in checkpoints if c.run} - {None}
    if len(values) > 1:
        words = " in one run, ".join(sorted(map(str, values)))
        raise UserError(
            f"{key}: {words} in another; score them apart (--rows replaces data_dir, --teacher "
            "teacher)"
        )
    return max(values, default=None)


def write(kind: str, values: dict, protocol: dict, scored: dict, c: Checkpoint, device) -> dict:
    """Append a result to results.jsonl, or print it if that is not possible, and return it.

    kind      "figures", or the split of the tasks
    protocol  what the user chose; the newest result by a protocol counts
    scored    hashes, which must be equal in a table; those of tasks are in `values`
    """
    result = {
        "name": c.name,
        "kind": kind,
        "protocol": protocol,
        "scored": scored,
        "values": values,
        "weights_sha256": c.weights_sha256,
        "tokenizer_sha256": c.tokenizer_sha256,
        "code": hashes(loaded_sources()),
        "run": c.run,
    }
    line = result | machine_facts(device)
    try:
        append_line(c.results / "results.jsonl", line)
    except UserError as error:
        print(json.dumps(line))
        result["error"] = error
    return result


def main(argv):
    args = arguments(argv)
    if args.table:
        from run.tables import tabulate

        print(tabulate(args.paths, args.reference, args.metric))
        return
    try:
        score(args)
    except torch.OutOfMemoryError as error:
        raise UserError(
            "out of memory: set a smaller --batch_tokens, or score fewer models at a time"
        ) from error


if __name__ == "__main__":
    configure.run(main)
