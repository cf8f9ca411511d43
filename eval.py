"""Score checkpoints: nine zero-shot tasks through lm-eval, and figures over held-out rows.

    python eval.py out/alra_200m --data_dir data/eval           # all students of the run
    python eval.py out/demo --tasks none                        # only the figures over val.bin
    python eval.py --table out/*                                # many results, the paper's rows, columns and numbers
    python eval.py --table out/alra_200m --metric acc_norm      # the same with acc_norm where a task has it

A run's folder stands for its students; one that is still in training for its newest checkpoint. Results go into the
student's own folder, those of a checkpoint or of any other model into out/eval/NAME: scores_SPLIT.json for the tasks (scores_SPLIT_limitN.json
for their first N items), figures.json for the held-out rows. Each file is the result of one command.

Prompts, choices and metrics are those of lm-eval's own task files (lib/tasks.py reads and checks the items); only the scoring
of requests is our own, for speed. Choices with one context are one row: the context, then each continuation, which sees the
context and itself alone and has the positions of its request. The head runs only where a continuation is scored, in fp32.

Dimension key: B batch, T time, N positions, V vocabulary, D width.
"""

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import logging
import os
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from torch import Tensor
from tqdm import tqdm

import configure
from lib import metrics
from lib.device import give_back_memory, machine_facts, pick_device
from lib.errors import UserError, require
from lib.files import locked, read_json, write_json, write_lines
from lib.hf import find_folder, load_tokenizer, tokenizer_hash, weights_hash
from lib.rows import Rows, open_rows
from lib.tasks import STORYCLOZE, TASKS, Items, choose_tasks, find_storycloze, read_items, task_file
from lib.tokens import leading_bos, token_bytes
from model import Qwen2, Qwen2Config
from run.cache import open_cached
from run.identity import content_hash
from run.tables import FILE, RUN, read_if_there, run_facts, scores_name, students_of, tabulate
from run.teacher import Teacher, check_teacher, load_teacher


class Scorer(TemplateLM):
    """lm-eval's view of a `Qwen2`: log-likelihoods of continuations, by the rules of its own Hugging Face backend.

    bos  the id that stood before each document in training and stands before each context here; None: none did;
         "auto": the one that the tokenizer adds by itself
    """

    def __init__(self, model: Qwen2, tokenizer, max_length: int = 512, batch_tokens: int = 4096, bos="auto"):
        super().__init__()
        self.bos = leading_bos(tokenizer) if bos == "auto" else bos
        self.prefix = tokenizer.bos_token_id if bos == "auto" else bos
        self.model, self.tokenizer, self.max_length, self.batch_tokens = model, tokenizer, max_length, batch_tokens
        self._device = model.head.device
        self.head = model.head.float()  # [V, D]

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token that replaces an empty context."""
        return self.eot_token_id if self.prefix is None else self.prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """With the BOS first, if there is one (Qwen has none)."""
        ids = self.tokenizer.backend_tokenizer.encode(string, add_special_tokens=False).ids
        return ids if self.bos is None or add_special_tokens is False else [self.bos, *ids]

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs) -> list[tuple[float, bool]]:
        """[((context, continuation), context ids, continuation ids)] -> log-probability (nats), all greedy?

        Consecutive requests that see the same context share a row. Longest rows first: what does not fit fails at once.
        """
        contexts = []  # what each request sees of its context: the last ids that fit beside the continuation
        for (context, continuation), head, tail in requests:
            fits = head and 0 < len(tail) <= self.max_length
            require(fits, f"{continuation!r:.60} after {context!r:.60}: {len(head)} + {len(tail)} tokens; expected a context, "
                    f"and a continuation of 1 to max_length={self.max_length} tokens")  # fmt: skip
            contexts.append(head[-(self.max_length + 1 - len(tail)) :])
        rows = [PackedRow.build(context, [(i, requests[i][2]) for i in numbers])
                for context, numbers in itertools.groupby(range(len(requests)), key=contexts.__getitem__)]  # fmt: skip
        rows.sort(key=lambda row: -len(row.ids))
        scores, missed = np.zeros((2, len(requests)))  # missed tokens are not the greedy choice
        n_tokens = sum(len(row.ids) for row in rows)
        with progress(None, "scoring", n_tokens, unit="token", disable=disable_tqdm or None) as bar:
            while rows:
                n = max(1, self.batch_tokens // len(rows[0].ids))
                batch, rows = rows[:n], rows[n:]
                self._score(batch, scores, missed)
                bar.update(sum(len(row.ids) for row in batch))
        return [(float(score), not miss) for score, miss in zip(scores, missed, strict=True)]

    @torch.inference_mode()
    def _score(self, batch: list["PackedRow"], scores: np.ndarray, missed: np.ndarray) -> None:
        """Add the log-probabilities of a batch to `scores` and its missed tokens to `missed`."""
        t = len(batch[0].ids)
        ids, positions, branch = np.zeros((3, len(batch), t), np.int64)
        for i, row in enumerate(batch):
            n = len(row.ids)
            ids[i, :n], positions[i, :n], branch[i, :n] = row.ids, row.positions, row.branch
        if branch.any():
            mask = np.tri(t, dtype=bool) & ((branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None]))
            h = self.model.hidden(*map(self._put, (ids, positions, mask[:, None])))
        else:  # plain causal rows, padded on the right
            h = self.model.hidden(self._put(ids))
        where = np.concatenate([i * t + np.array(row.where) for i, row in enumerate(batch)])
        what, whose = (np.concatenate([getattr(row, key) for row in batch]) for key in ("what", "whose"))
        scored, place = np.unique(where, return_inverse=True)  # choices share the position before their first token
        h = h.flatten(0, 1)[self._put(scored)].float()  # [N, D]
        for lo in range(0, len(scored), 1024):
            inside = (place >= lo) & (place < lo + 1024)
            row, y = self._put(place[inside] - lo), self._put(what[inside])
            logp, greedy = token_logprobs(h[lo : lo + 1024], self.head, row, y, metrics.N_LOGITS[self._device.type])
            np.add.at(scores, whose[inside], logp.cpu().numpy())
            np.add.at(missed, whose[inside], ~greedy.cpu().numpy())

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def generate_until(self, requests, disable_tqdm: bool = False):
        raise NotImplementedError("none of the nine tasks asks for it")

    loglikelihood_rolling = generate_until


class PackedRow(NamedTuple):
    """A context and the continuations that are scored after it."""

    ids: list[int]  # the context, then each continuation without its last token
    positions: list[int]
    branch: list[int]  # 0 in the context, 1, 2, .. in the continuations
    where: list[int]  # of each token that is scored: the place before it
    what: list[int]  # the token itself
    whose: list[int]  # the number of its request

    @classmethod
    def build(cls, context: list[int], tails: list[tuple[int, list[int]]]) -> "PackedRow":
        """tails: number and continuation of each request"""
        n, starts = len(context), {}  # equal continuations share a branch, so that they tie
        row = cls(list(context), list(range(n)), [0] * n, [], [], [])
        for number, tail in tails:
            first = starts.setdefault(tuple(tail), len(row.ids))
            if first == len(row.ids):
                row.ids.extend(tail[:-1])
                row.positions.extend(range(n, n + len(tail) - 1))
                row.branch.extend([len(starts) if len(tails) > 1 else 0] * (len(tail) - 1))
            row.where.extend([n - 1, *range(first, first + len(tail) - 1)])
            row.what.extend(tail)
            row.whose.extend([number] * len(tail))
        return row


def token_logprobs(h: Tensor, w: Tensor, row: Tensor, y: Tensor, n_logits: int) -> tuple[Tensor, Tensor]:
    """log softmax(h w^T)[row, y] in fp64, and whether y is the first largest logit of its row.

    Block by block over the vocabulary with a running maximum and sum, `n_logits` at a time: on the CPU they stay in
    its cache, which halves the time of a narrow model.

    h [N, D], w [V, D]; row, y [M], with row < N and y < V -> [M], [M]
    """
    best, total = h.new_full((len(h),), -torch.inf), h.new_zeros(len(h), dtype=torch.float64)  # [N]
    holder = row.new_zeros(len(h))  # [N] block of the first largest logit
    z_y, leads = h.new_empty(len(y)), torch.zeros_like(y, dtype=torch.bool)  # [M]
    size = max(1, n_logits // len(h))
    for block, w_block in enumerate(w.split(size)):
        z = h @ w_block.T  # [N, size]
        top = z.amax(-1)
        inside = (y // size == block).nonzero()[:, 0]
        z_y[inside] = z[row[inside], y[inside] - block * size]
        ahead = inside[z_y[inside] == top[row[inside]]]
        if len(ahead):  # among equal logits the first is the greedy one
            leads[ahead] = z[row[ahead]].argmax(-1) == y[ahead] - block * size
        holder[top > best] = block
        new = torch.maximum(best, top)
        total = total * (best - new).double().exp() + z.sub_(new[:, None]).exp_().sum(-1).double()
        best = new
    greedy = leads & (holder[row] == y // size)
    return (z_y - best[row]).double() - total.log()[row], greedy


def progress(*args, **kwargs) -> tqdm:
    """A progress bar with ETA; without a terminal, one line of it every half minute."""
    seconds = 0.1 if sys.stderr.isatty() else 30.0
    return tqdm(*args, mininterval=seconds, maxinterval=max(10.0, seconds), **kwargs)


def benchmarks(lm: TemplateLM, items: dict[str, Items], args) -> dict[str, dict]:
    """Scores by task: n, acc, acc_norm, perplexity, standard errors, and the hashes of what was scored."""
    import datasets
    import lm_eval
    from lm_eval.tasks import TaskManager

    os.environ["DISABLE_MULTIPROC"] = "1"  # lm-eval's bootstrap would fork a process with threads
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        for name, chosen in items.items():
            file = f"{folder}/{name}.parquet"
            datasets.Dataset.from_list(chosen.rows[: args.limit]).to_parquet(file)
            overlay = {"include": str(task_file(name)), "task": name, "tag": None, "dataset_path": "parquet",
                       "dataset_name": None, "dataset_kwargs": {"data_files": {"test": file}, "cache_dir": folder},
                       "training_split": None, "validation_split": None, "test_split": "test", "fewshot_split": None,
                       "num_fewshot": 0}  # fmt: skip
            Path(folder, f"{name}.yaml").write_text(json.dumps(overlay))  # JSON is YAML
        loaded = TaskManager(include_defaults=False, include_path=folder).load(list(items))
        out = lm_eval.evaluate(lm, loaded, bootstrap_iters=1_000, log_samples=args.log_samples)
    scores = {}
    for name, task in loaded["tasks"].items():
        prompts = hashlib.sha256()
        for instance in task.instances:
            prompts.update(json.dumps(instance.args).encode())
        n, chosen = len({i.doc_id for i in task.instances}), items[name]
        values = {key.removesuffix(",none"): v for key, v in out["results"][name].items() if key.endswith(",none")}
        values = {key: v for key, v in values.items() if v == v}  # of one item there is no standard error
        scores[name] = {
            **values, "n": n, "n_rows": len(chosen.rows), "n_paper": getattr(TASKS[name], args.split)[1],
            "source": chosen.source, "data_sha256": chosen.sha256, "prompts_sha256": prompts.hexdigest(),
            "version": out["versions"][name], **({"samples": out["samples"][name]} if args.log_samples else {}),
        }  # fmt: skip
    return scores


def over_rows(
    students: list[Qwen2], teacher: Teacher | None, rows: Rows, index: np.ndarray, n_bytes: np.ndarray,
    batch_tokens: int,
) -> list[dict[str, float]]:  # fmt: skip
    """The figures of each student, with the number of targets, `n_targets`.

    index    of the rows to read
    n_bytes  [V] bytes of text that a token stands for. A BOS and an EOS are targets like any other, but have no text: bits
             per byte leave them out.
    """
    device = students[0].head.device
    per_batch = max(1, batch_tokens // rows.ids.shape[1])

    def batches():
        for first in progress(range(0, len(index), per_batch), "held-out rows", unit="batch"):
            some = index[first : first + per_batch]
            x, y, _ = rows.batch(some, device)
            yield first, x, y, teacher.hidden(x, rows, some) if teacher else None

    models = [(model.hidden, model.head) for model in students]
    head_t = teacher.head if teacher else None
    found = metrics.row_sums(models, head_t, batches(), len(index), torch.from_numpy(n_bytes).to(device))
    found = [{key: value.cpu().numpy().sum(0) for key, value in sums.items()} for sums in found]
    finite = all(np.isfinite(sums["ce"]) for sums in found)
    require(finite, "the probability of a held-out token is 0 or not a number; the weights have diverged")
    figures = [{key: float(value) for key, value in metrics.figures(sums).items()} for sums in found]
    return [of_student | {"n_targets": int(sums["n"])} for of_student, sums in zip(figures, found, strict=True)]


def byte_lengths(tokenizer, n_vocab: int) -> np.ndarray:
    """Bytes of text that each token stands for, [V]; 0 for special tokens and padded rows of the vocabulary."""
    lengths = [len(piece) for piece in token_bytes(tokenizer.backend_tokenizer)]
    return np.pad(lengths, (0, n_vocab - len(lengths)))


def held_out_figures(
    checkpoints: list["Checkpoint"], rows: Rows, index: np.ndarray, teacher_name: str | None, args, device: torch.device
) -> list[dict]:
    """Per checkpoint: the figures over the rows of `index` with what they were made from."""
    n_vocab, teacher = rows.n_vocab, None
    scored = hashlib.sha256(rows.ids[index].tobytes()).hexdigest()
    facts = {"n_rows": len(index), "skip_rows": args.skip_rows, "rows_sha256": scored, **rows.levels}
    if teacher_name:
        facts |= {"teacher": teacher_name, "teacher_sha256": content_hash(teacher_name)}
        dtype = getattr(torch, args.dtype)
        teacher = open_cached(teacher_name, dtype, device, n_vocab, {rows: [index]})
        teacher = teacher or load_teacher(teacher_name, dtype, device, vocab_size=n_vocab)
        n = len(teacher.head)
        require(n == n_vocab, f"{teacher_name}: vocabulary of {n:,}, {checkpoints[0].name} has {n_vocab:,}")
    n_bytes = byte_lengths(read_tokenizer(checkpoints[0].source), n_vocab)
    models = [c.load(args.dtype, device) for c in checkpoints]  # one pass of the teacher for all
    figures = over_rows(models, teacher, rows, index, n_bytes, args.batch_tokens)
    return [of_student | facts for of_student in figures]


def open_heldout(data_dir: str, checkpoints: list["Checkpoint"], teacher: str | None, args) -> tuple[Rows, np.ndarray]:
    """The held-out rows, and the index of those to score. Refuses rows of another tokenizer or BOS, and rows that are too long."""
    seq_len, first = open_rows(data_dir, "val")[1]["row_len"] - 1, checkpoints[0]
    rows = Rows(data_dir, "val", seq_len, False, first.shape.vocab_size)
    bos = rows.manifest.get("bos")
    for c in checkpoints:
        n_vocab, most, trained = c.shape.vocab_size, c.shape.max_position_embeddings, c.run.get("bos") if c.run else bos
        same = rows.manifest["tokenizer_sha256"] == c.tokenizer_sha256
        require(same, f"{data_dir}: rows of another tokenizer than that of {c.name}; prepare some with that one")
        require(bos == trained, f"{data_dir}: rows with bos={bos}, but {c.name} was trained on rows with bos={trained}")
        require(seq_len <= most, f"{data_dir}: rows of {seq_len} inputs, {c.name} takes {most} at most")
        require(n_vocab == rows.n_vocab, f"{c.name}: vocabulary of {n_vocab:,}, {first.name} has {rows.n_vocab:,}")
    if teacher:
        check_teacher(teacher, read_tokenizer(first.source), seq_len)
    index = np.arange(rows.n)[args.skip_rows :][: args.max_rows]
    require(len(index), f"--skip_rows {args.skip_rows}: {data_dir} has {rows.n} held-out rows")
    return rows, index


read_tokenizer = functools.lru_cache(maxsize=1)(load_tokenizer)  # a large one takes as much memory as a small student


@dataclass(frozen=True)
class Checkpoint:
    name: str  # as the user gave it
    source: str  # the model's folder
    folder: Path  # where its results go
    run: dict | None  # facts of the student's training; None for other models
    shape: Qwen2Config
    weights_sha256: str  # of the fp32 weights, whatever --dtype
    tokenizer_sha256: str

    def load(self, dtype: str, device: torch.device) -> Qwen2:
        give_back_memory()  # of models before
        return Qwen2.from_pretrained(self.source, device=str(device)).to(getattr(torch, dtype))


def has_model(folder: Path) -> bool:
    """Whether a student has ended, or is at work and has a checkpoint."""
    works = not (folder / "stopped.json").is_file() and any(folder.glob("checkpoints/step_*/model/config.json"))
    return works or (folder / "model" / "config.json").is_file()


def open_checkpoint(name: str, out: str | None) -> Checkpoint:
    """A student's folder, a checkpoint, a model's folder or a hub id: hashed, and checked against its tokenizer."""
    source = find_folder(name)
    require((source / "config.json").is_file(), f"{name}: no model/ in it, and no checkpoint; has its training begun?")
    run, parts = run_facts(source, RUN) or None, source.parent.resolve().parts
    folder = source.parent if run else Path("out", "eval", Path(name).resolve().name)
    if run and not (source.parent / "run.json").is_file():
        say(f"{name}: scoring {source.parent}, of a training that goes on")
        folder = Path("out", "eval", "_".join(parts[i] for i in (-4, -3, -1)))  # a checkpoint may be removed
    give_back_memory()
    model, tokenizer = Qwen2.from_pretrained(str(source)), read_tokenizer(str(source))
    n_vocab, n_ids = len(model.head), max(tokenizer.get_vocab().values()) + 1
    require(n_ids <= n_vocab, f"{name}: vocabulary of {n_vocab:,}, but its tokenizer has ids up to {n_ids - 1:,}")
    return Checkpoint(
        name, str(source), Path(out or folder), run, model.config, weights_hash(model), tokenizer_hash(tokenizer)
    )


def shared_setting(flag: str, given: str | None, key: str, checkpoints: list[Checkpoint]) -> str | None:
    """A setting from its flag, or else from the runs' configs, which must agree. None: not set, or "none"."""
    values = [given] if given else dict.fromkeys(c.run["config"].get(key) for c in checkpoints if c.run)
    values = [value for value in values if value]
    require(len(values) <= 1, f"{key}: {' in one run, '.join(values)} in another; score them apart, or set {flag}")
    return None if not values or values[0] == "none" else values[0]


def check_results(c: Checkpoint, scores_file: str, protocol: dict, names: list[str], figures: bool) -> None:
    """Refuse to lose scores, or figures of another dtype. Results of a student's older weights are removed.

    protocol, names  of the scores that will be written, if there are names
    figures          whether figures will be written
    """
    for file in (*c.folder.glob("scores_*.json"), *c.folder.glob("figures.json")):
        before = read_json(file, FILE)
        if before["weights_sha256"] != c.weights_sha256:
            own = c.run and c.folder == Path(c.source).parent
            require(own, f"{file}: results of other weights than {c.name}; set another --out, or move it aside")
            for suffix in (".json", ".jsonl"):
                file.with_suffix(suffix).unlink(missing_ok=True)
        elif (names and file.name == scores_file) or (figures and file.name == "figures.json"):
            lost = [f"{key}={value}" for key, value in before["protocol"].items() if protocol[key] != value]
            lost += sorted({*before.get("tasks", {})} - {*names})
            require(not lost, f"{file}: holds results with {', '.join(lost)}, which this command would lose; set another --out, "
                    "or move it aside")  # fmt: skip


def score(args) -> str:
    """Score all checkpoints -> their tables. The files of a checkpoint are written as soon as it is scored."""
    device = pick_device(args.device)
    paths, unfinished = students_of(args.paths, has_model)
    reasons = {path: read_if_there(Path(path, "stopped.json"), ("why",)) for path in unfinished}
    unfinished = ", ".join(f"{path} (stopped at {why['why']})" if why else path for path, why in reasons.items())
    require(paths, f"no finished student: {unfinished or ' '.join(args.paths)}; expected out/NAME or a model")
    if unfinished:
        say(f"left out, as there is no model yet: {unfinished}")
    require(not args.out or len(paths) == 1, f"--out {args.out}: takes the results of one checkpoint, got {len(paths)}")
    names = choose_tasks(args.tasks, args.split)
    if "storycloze_2016" in names and args.tasks == "all" and not find_storycloze(args.data_dir, args.storycloze):
        names.remove("storycloze_2016")
        say(STORYCLOZE)
    checkpoints = [open_checkpoint(name, args.out) for name in paths]  # a missing one must show before the hub is asked
    items = read_items(names, args.split, args.data_dir, args.storycloze, args.any_items)
    data_dir = shared_setting("--rows", args.rows, "data_dir", checkpoints)
    teacher = shared_setting("--teacher", args.teacher, "teacher", checkpoints)
    require(names or data_dir, "--tasks none and no rows: nothing to score; name a folder with val.bin by --rows DIR")
    for c in checkpoints:
        most, same = c.shape.max_position_embeddings, [other.name for other in checkpoints if other.folder == c.folder]
        require(not names or args.max_length <= most, f"--max_length {args.max_length}: {c.name} takes {most} at most")
        require(len(same) == 1, f"{' and '.join(same)}: results of both would go to {c.folder}; score one with --out")
    rows = open_heldout(data_dir, checkpoints, teacher, args) if data_dir else None
    protocol = {"dtype": args.dtype, "lm_eval": version("lm_eval"), "max_length": args.max_length, "limit": args.limit}
    scores_file, busy = scores_name(args.split, args.limit), "another eval.py is at work there; wait for its end"
    with contextlib.ExitStack() as stack:
        for c in checkpoints:
            stack.enter_context(locked(c.folder, f"{c.folder}: {busy}"))
            check_results(c, scores_file, protocol, names, rows is not None)
        if rows:
            found = held_out_figures(checkpoints, *rows, teacher, args, device)
            for c, figures in zip(checkpoints, found, strict=True):
                write(c.folder / "figures.json", c, device, {"dtype": args.dtype}, figures=figures)
        for c in checkpoints if names else ():
            model = c.load(args.dtype, device)
            bos = c.run.get("bos") if c.run else "auto"
            scorer = Scorer(model, read_tokenizer(c.source), args.max_length, args.batch_tokens, bos)
            scores = benchmarks(scorer, items, args)
            samples = [{"task": name, **sample} for name in scores for sample in scores[name].pop("samples", ())]
            write(c.folder / scores_file, c, device, protocol, tasks=scores)
            if samples:
                write_lines(c.folder / f"{scores_file}l", samples)
            del model, scorer  # before the next one is loaded
    return show([str(c.folder) for c in checkpoints], args)


def write(file: Path, c: Checkpoint, device: torch.device, protocol: dict, **content) -> None:
    """Write a checkpoint's results with what they were made from."""
    facts = {"name": c.name, "weights_sha256": c.weights_sha256, "tokenizer_sha256": c.tokenizer_sha256}
    write_json(file, facts | {"protocol": protocol, **content, "run": c.run, **machine_facts(device)})
    print(file, flush=True)


def show(folders: list[str], args) -> str:
    """One table of the checkpoints that were scored; the table of each where they cannot be compared."""
    try:
        return tabulate(folders, args.reference, args.metric, [args.split], args.limit)
    except UserError as error:
        require(len(folders) > 1, str(error))
        apart = [tabulate([folder], "pretrain", args.metric, [args.split], args.limit) for folder in folders]
        return "\n".join([*apart, f"Each by itself: {error}"])


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def arguments(argv: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser(description="Score checkpoints, or tabulate what was scored.")
    add = p.add_argument
    add("paths", nargs="+", metavar="PATH", help="out/NAME or out/NAME/METHOD, a model folder or a hub id")
    add("--tasks", default="all", help="all, none, or names with commas")
    add("--split", default="heldout", choices=("heldout", "validation"), help="which of the paper's two sets")
    add("--data_dir", help="local DIR/TASK/SPLIT.jsonl, or DIR/OWNER/NAME as on the hub; else the hub itself")
    add("--storycloze", metavar="FILE", help="your copy of StoryCloze: .csv or .jsonl")
    add("--any_items", action="store_true", help="score items that are not the published ones too")
    add("--limit", type=int, help="score only the first N items of each task; with --table: such scores")
    add("--rows", metavar="DIR", help="folder with val.bin for the figures over held-out rows, or none; else the run's")
    add("--max_rows", type=int, default=512, help="number of its rows to read")
    add("--skip_rows", type=int, default=0, help="number of its first rows to skip: those that have chosen settings")
    add("--teacher", metavar="NAME", help="whom to compare with on those rows, or none; else the run's")
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the backbone; scores are float32")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    add("--batch_tokens", type=int, default=4096, help="tokens per forward: speed and memory only")
    add("--max_length", type=int, default=512, help="tokens that the model sees; longer requests lose their beginning")
    add("--log_samples", action="store_true", help="also write every item with its scores")
    add("--out", metavar="DIR", help="where results go; else the student's folder, or out/eval/NAME for other models")
    add("--table", action="store_true", help="only print the tables of earlier results")
    add("--reference", default="pretrain", help="of tables: the method that gains are measured from")
    add("--metric", default="acc", choices=("acc", "acc_norm"), help="of tables; acc_norm where a task has it")
    args = p.parse_args(argv)
    for key, least in {"limit": 2, "max_rows": 1, "skip_rows": 0, "batch_tokens": 1, "max_length": 1}.items():
        value = getattr(args, key)
        require(value is None or value >= least, f"--{key} {value}: expected at least {least}")
    return args


def main(argv: list[str]) -> None:
    args = arguments(argv)
    print(tabulate(args.paths, args.reference, args.metric, limit=args.limit) if args.table else score(args))


if __name__ == "__main__":
    sys.exit(configure.guard(lambda: main(sys.argv[1:])))
