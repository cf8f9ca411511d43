"""Score checkpoints: nine zero-shot tasks through lm-eval, and figures over held-out rows.

    python eval.py out/alra_200m/alra --data_dir data/eval      # one JSON and one Markdown table in that folder
    python eval.py out/demo --tasks none                        # all its students; only the figures over val.bin
    python eval.py --table out/*/*                              # many results, the paper's rows, columns and numbers
    python eval.py --table out/alra_200m --metric acc_norm      # the same with acc_norm where a task has it

A run's folder stands for its students, and so does `out/NAME/*`; those that are still in training are named and left
out. Results go into the student's own folder, those of any other model into out/eval/NAME. Several get one table where
they can be compared.

Prompts, choices and metrics are those of lm-eval's own task files (tasks.py finds and checks their rows); here requests
are scored, fast. Choices that share a context are one row: the context, then each continuation, which sees the context
and itself alone and has the positions of its request. The head runs only where a continuation is scored, in fp32.

Dimension key: B batch, T time, N positions, V vocabulary, D width.
"""

import argparse
import contextlib
import csv
import hashlib
import itertools
import json
import logging
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

import configure
from lib import figures, heldout
from lib.checks import IGNORE
from lib.device import count, device_name, free_bytes, gib, give_back_memory, pick_device
from lib.files import UserError, dump, locked, write_whole
from lib.hf import find_folder, leading_bos, load_tokenizer, tokenizer_hash, weights_hash
from lib.rows import PAD, open_rows
from lib.tables import RESULT, RUN, read_if_there, row_text, stand_for, tabulate
from lib.tasks import STORYCLOZE, TASKS, Items, choose_tasks, differing, find_storycloze, read_items, task_file
from lib.teacher import Teacher, load_teacher, n_params
from lib.tokens import token_bytes
from model import Qwen2, Qwen2Config

N_LOGITS = {"cpu": 2**21, "cuda": 2**27}  # logits that exist at a time: 8 MiB, which a cache holds, and 512 MiB


# --- scoring requests ------------------------------------------------------------------------------------------


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
        return self._encode([string], add_special_tokens is not False)[string]

    def _encode(self, texts, special: bool = True, quiet: bool = True) -> dict[str, list[int]]:
        """Encode each distinct text once -> its ids. `special` puts the BOS first, if there is one (Qwen has none)."""
        texts, ids = list(dict.fromkeys(texts)), []
        before = [self.bos] if special and self.bos is not None else []
        for lo in tqdm(range(0, len(texts), 4096), "tokenizing", unit="batch", disable=quiet or None):
            some = self.tokenizer.backend_tokenizer.encode_batch_fast(texts[lo : lo + 4096], add_special_tokens=False)
            ids += [before + encoding.ids for encoding in some]
        return dict(zip(texts, ids, strict=True))

    def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """As `TemplateLM.loglikelihood` and `_encode_pair`, with every text encoded once and in batches."""
        pairs = []
        for context, continuation in (r.args for r in requests):
            bare = context.rstrip()
            if context and not bare:
                raise UserError(f"a context of whitespace alone, before {continuation!r:.60}: nothing to condition on")
            pairs.append((bare, context[len(bare) :] + continuation))
        ids = self._encode((t for c, e in pairs if c for t in (c, c + e)), quiet=disable_tqdm)
        plain = self._encode((e for c, e in pairs if not c), special=False)
        prefix, encoded = [self.prefix_token_id], []
        for request, (context, end) in zip(requests, pairs, strict=True):
            if context:
                head = ids[context]
                tail = ids[context + end][len(head) :]
            elif plain[end][:1] == prefix:
                head, tail = prefix, plain[end][1:]
            else:
                head, tail = prefix, plain[end]
            encoded.append((request.args, head, tail))
        return self._loglikelihood_tokens(encoded, disable_tqdm)

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs) -> list[tuple[float, bool]]:
        """[((context, continuation), context ids, continuation ids)] -> log-probability (nats), all greedy?

        Requests that stand together and see the same context share a row. Longest rows first: what does not fit, fails
        at once.
        """
        seen = []  # the context ids of each request that fit beside its continuation
        for (context, continuation), head, tail in requests:
            if not head or not 0 < len(tail) <= self.max_length:
                raise UserError(f"{continuation!r:.60} after {context!r:.60}: {len(head)} + {len(tail)} tokens; expected a "
                                f"context, and a continuation of 1 to max_length={self.max_length} tokens")  # fmt: skip
            seen.append(head[-(self.max_length + 1 - len(tail)) :])
        rows = [Row.of(seen[group[0]], [(i, requests[i][2]) for i in group])
                for group in (list(g) for _, g in itertools.groupby(range(len(seen)), key=seen.__getitem__))]  # fmt: skip
        rows.sort(key=lambda row: -len(row.ids))
        scores, missed = np.zeros((2, len(requests)))  # missed tokens are not the greedy choice
        with progress(None, "scoring", sum(len(row.ids) for row in rows), unit="token", disable=disable_tqdm or None) as bar:
            while rows:
                n = max(1, self.batch_tokens // len(rows[0].ids))
                batch, rows = rows[:n], rows[n:]
                self._score(batch, scores, missed)
                bar.update(sum(len(row.ids) for row in batch))
        return [(float(score), not miss) for score, miss in zip(scores, missed, strict=True)]

    @torch.inference_mode()
    def _score(self, batch: list["Row"], scores: np.ndarray, missed: np.ndarray) -> None:
        """Add the log-probabilities of a batch to `scores` and its missed tokens to `missed`."""
        t = len(batch[0].ids)
        ids, positions, branch = np.zeros((3, len(batch), t), np.int64)
        for i, row in enumerate(batch):
            for to, values in ((ids, row.ids), (positions, row.positions), (branch, row.branch)):
                to[i, : len(values)] = values
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
            here = (place >= lo) & (place < lo + 1024)
            row, y = self._put(place[here] - lo), self._put(what[here])
            logp, greedy = pick(h[lo : lo + 1024], self.head, row, y, N_LOGITS[self._device.type])
            np.add.at(scores, whose[here], logp.cpu().numpy())
            np.add.at(missed, whose[here], ~greedy.cpu().numpy())

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False):
        raise NotImplementedError("none of the nine tasks asks for it")

    def generate_until(self, requests, disable_tqdm: bool = False):
        raise NotImplementedError("none of the nine tasks asks for it")


class Row(NamedTuple):
    """A context and the continuations that are scored after it."""

    ids: list[int]  # the context, then each continuation without its last token
    positions: list[int]
    branch: list[int]  # 0 in the context, 1, 2, .. in the continuations
    where: list[int]  # of each token that is scored: the place before it,
    what: list[int]  # the token,
    whose: list[int]  # and the number of its request

    @classmethod
    def of(cls, context: list[int], tails: list[tuple[int, list[int]]]) -> "Row":
        n = len(context)
        row = cls(list(context), list(range(n)), [0] * n, [], [], [])
        for k, (number, tail) in enumerate(tails, 1):
            first = len(row.ids)
            row.where.extend([n - 1, *range(first, first + len(tail) - 1)])
            row.ids.extend(tail[:-1])
            row.positions.extend(range(n, n + len(tail) - 1))
            row.branch.extend([k if len(tails) > 1 else 0] * (len(tail) - 1))
            row.what.extend(tail)
            row.whose.extend([number] * len(tail))
        return row


def pick(h: Tensor, w: Tensor, row: Tensor, y: Tensor, n_logits: int) -> tuple[Tensor, Tensor]:
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
        here = (y // size == block).nonzero()[:, 0]
        z_y[here] = z[row[here], y[here] - block * size]
        ahead = here[z_y[here] == top[row[here]]]
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


# --- the nine tasks --------------------------------------------------------------------------------------------


def benchmarks(lm: TemplateLM, items: dict[str, Items], args) -> dict[str, dict]:
    """Scores by task: n, acc, acc_norm, perplexity, standard errors, and the hashes of what was scored."""
    import datasets
    import lm_eval
    from lm_eval.tasks import TaskManager

    os.environ["DISABLE_MULTIPROC"] = "1"  # lm-eval's bootstrap would fork a process with threads
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        for name, found in items.items():
            file = f"{folder}/{name}.parquet"
            datasets.Dataset.from_list(found.rows[: args.limit]).to_parquet(file)
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
        config = {k: v for k, v in task.dump_config().items() if k not in ("dataset_kwargs", "metadata")}
        config = json.dumps(config, sort_keys=True, default=lambda f: f"{f.__module__}.{f.__qualname__}")
        n, found = len({i.doc_id for i in task.instances}), items[name]
        metrics = {key.removesuffix(",none"): v for key, v in out["results"][name].items() if key.endswith(",none")}
        scores[name] = {
            **metrics, "n": n, "n_rows": len(found.rows), "n_paper": getattr(TASKS[name], args.split)[1],
            "source": found.where, "data_sha256": found.sha256, "prompts_sha256": prompts.hexdigest(),
            "task_sha256": hashlib.sha256(config.encode()).hexdigest(), "version": out["versions"][name],
            "task": json.loads(config), **({"samples": out["samples"][name]} if args.log_samples else {}),
        }  # fmt: skip
    return scores


# --- figures over held-out rows --------------------------------------------------------------------------------


def over_rows(
    students: list[Qwen2],
    teacher: Teacher | None,
    rows: np.ndarray,
    n_bytes: np.ndarray,
    batch_tokens: int,
) -> list[dict[str, np.ndarray]]:
    """The summands of `figures.figures`, per student and row.

    rows [n, row_len] uint32, PAD at the tail; n_bytes [V] bytes of text that a token stands for. A BOS and an EOS are
    targets like any other, but have no text: bits per byte leave them out.
    """
    device = students[0].head.device
    per_batch = max(1, batch_tokens // rows.shape[1])
    starts = range(0, len(rows), per_batch)

    def batches():
        for first in progress(starts, "held-out rows", unit="batch"):
            ids = torch.from_numpy(rows[first : first + per_batch].astype(np.int64)).to(device)
            yield (
                first,
                ids[:, :-1].masked_fill(ids[:, :-1] == PAD, 0),
                ids[:, 1:].masked_fill(ids[:, 1:] == PAD, IGNORE),
            )

    models = [(m.hidden, m.head) for m in students]
    of_teacher = (teacher.hidden, teacher.head) if teacher else None
    every = heldout.row_sums(models, of_teacher, batches(), len(rows), torch.from_numpy(n_bytes).to(device))
    found = [{key: value.cpu().numpy() for key, value in of.items()} for of in every]
    if not all(np.isfinite(of["ce"]).all() for of in found):
        raise UserError("a held-out token's probability is not a number or 0; the weights have diverged")
    return found


def byte_lengths(tokenizer, n_vocab: int) -> np.ndarray:
    """Bytes of text that each token stands for, [V]; 0 for special tokens and padded rows of the vocabulary."""
    lengths = np.zeros(n_vocab, np.int64)
    pieces = token_bytes(tokenizer.backend_tokenizer)
    lengths[: len(pieces)] = [len(piece) for piece in pieces]
    return lengths


# --- one checkpoint --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    name: str  # as the user gave it
    folder: Path  # where its results go
    run: dict | None  # facts of the student's training, with the run's config; None for other models
    source: str  # the model's folder
    shape: Qwen2Config
    tokenizer: PreTrainedTokenizerFast
    sha256: str  # of the fp32 weights, so that it does not depend on --dtype

    def load(self, args, device: torch.device) -> Qwen2:
        """The model; of many checkpoints only those at work are in memory."""
        give_back_memory()  # of those before
        return Qwen2.from_pretrained(self.source, device=str(device)).to(getattr(torch, args.dtype))


def locate(name: str, args) -> tuple[str, Path, dict | None]:
    """A student's folder, a model folder or a hub id -> the model's folder, where results go, and facts of its run."""
    path, source, folder, run = Path(name), name, args.out, None
    if path.name == "model" and (path.parent / "run.json").is_file():
        path = path.parent  # the user named the student's model/ folder
    if (path / "model" / "config.json").is_file():
        source, folder = str(path / "model"), folder or path
        facts, whole = read_if_there(path / "run.json", RUN), read_if_there(path.parent / "run.json", {"config": dict})
        run = facts | {"config": whole["config"]} if facts and whole else None
    elif path.is_dir() and not (path / "config.json").is_file():
        inside = sorted(p.parent.parent.name for p in path.glob("*/model/config.json"))
        what = f"a folder of {', '.join(inside)}; name one" if inside else "no model/ in it; has its training ended?"
        raise UserError(f"{name}: {what}")
    source = str(find_folder(source))
    if not folder:
        folder = Path("out", "eval", path.resolve().name)
        if any((place / "run.json").is_file() for place in (folder, folder.parent)):
            raise UserError(f"{name}: its results would go to {folder}, which is a run's; set another --out")
    return source, Path(folder), run


def open_checkpoint(name: str, source: str, folder: Path, run: dict | None, args, known: dict) -> Checkpoint:
    """Hash what `locate` has found, and check it against its tokenizer; `known` holds those that are loaded."""
    tokenizer = load_tokenizer(source)
    tokenizer = known.setdefault((tokenizer_hash(tokenizer), tokenizer.eos_token_id, tokenizer.bos_token_id), tokenizer)
    give_back_memory()
    model = Qwen2.from_pretrained(source)
    n_vocab, n_ids = len(model.head), max(tokenizer.get_vocab().values()) + 1
    if n_ids > n_vocab:
        raise UserError(f"{name}: vocabulary of {n_vocab:,}, but its tokenizer has ids up to {n_ids - 1:,}")
    if args.max_length > model.config.max_position_embeddings:
        raise UserError(f"--max_length {args.max_length}: {name} takes {model.config.max_position_embeddings} at most")
    return Checkpoint(name, folder, run, source, model.config, tokenizer, weights_hash(model))


def shared_setting(flag: str, given: str | None, key: str, checkpoints: list[Checkpoint]) -> str | None:
    """A setting from its flag, or else from the runs' configs, which must agree. None: not set, or "none"."""
    values = [given] if given else list(dict.fromkeys(c.run["config"].get(key) for c in checkpoints if c.run))
    values = [v for v in values if v]
    if len(values) > 1:
        raise UserError(f"{key}: {values[0]} in one run, {values[1]} in another; score them apart, or set {flag}")
    return None if not values or values[0] == "none" else values[0]


def score(args, device: torch.device, stack: contextlib.ExitStack) -> None:
    """Score all checkpoints. Each result file is written as soon as its checkpoint is done; then print their table.

    stack  holds the locks of the folders that results go to
    """
    paths, unfinished = stand_for(args.paths, lambda folder: (folder / "model" / "config.json").is_file())
    why = {path: read_if_there(Path(path) / "stopped.json", {"why": str}) for path in unfinished}
    unfinished = [f"{path} (stopped at {of['why']})" if of else path for path, of in why.items()]
    if not paths:
        raise UserError(
            f"no finished student: {', '.join(unfinished) or ' '.join(args.paths)}; expected out/NAME or a model"
        )
    if unfinished:
        say(f"left out, as training has not ended there: {', '.join(unfinished)}")
    if args.out and len(paths) > 1:
        raise UserError(f"--out {args.out}: holds one checkpoint's results, got {len(paths)} checkpoints")
    # a missing folder must show before the hub is asked
    places = [locate(name, args) for name in paths]
    names = choose_tasks(args.tasks, args.split)
    if "storycloze_2016" in names and args.tasks == "all" and not find_storycloze(args.data_dir, args.storycloze):
        names.remove("storycloze_2016")
        say(STORYCLOZE)
    # errors in the items must show before anything is computed
    items = read_items(names, args.split, args.data_dir, args.storycloze)
    for line in differing(items, args.split):
        say(line)
    known = {}
    checkpoints = [open_checkpoint(name, *at, args, known) for name, at in zip(paths, places, strict=True)]
    rows_dir = shared_setting("--rows", args.rows, "data_dir", checkpoints)
    teacher = shared_setting("--teacher", args.teacher, "teacher", checkpoints)
    if not names and not rows_dir:
        raise UserError("--tasks none and no rows: nothing to score; name a folder with val.bin by --rows DIR")
    rows, manifest = open_rows(rows_dir, "val") if rows_dir else (None, None)
    if rows_dir and args.skip_rows >= len(rows):
        raise UserError(f"--skip_rows {args.skip_rows}: {rows_dir} has {len(rows)} held-out rows")
    rows = rows[args.skip_rows :][: args.max_rows] if rows_dir else None
    protocol = {"lm_eval": version("lm_eval"), "dtype": args.dtype, "max_length": args.max_length, "limit": args.limit}
    for i, c in enumerate(checkpoints):
        if c.folder in [other.folder for other in checkpoints[:i]]:
            raise UserError(
                f"{c.name}: its results would go to {c.folder}, like another's; score it apart, with an --out"
            )
        before = read_if_there(c.folder / f"eval_{args.split}.json", RESULT)
        if before and before.get("weights_sha256") == c.sha256:
            refuse_loss(c, before, protocol, bool(items), rows, teacher)
        elif before and (args.out or c.run is None):  # a student's own folder may be scored again after more training
            raise UserError(
                f"{c.folder}: holds results of other weights than {c.name}; set another --out, or move them aside"
            )
        c.folder.mkdir(parents=True, exist_ok=True)  # an unwritable folder must show before anything is computed
        stack.enter_context(locked(c.folder, UserError(f"{c.folder}: another eval.py is at work there; wait for its end")))
    intrinsic = [(None, None)] * len(checkpoints)
    if rows_dir:
        check_rows_fit(rows_dir, rows, manifest, checkpoints)
        intrinsic = held_out_figures(checkpoints, rows, teacher, args, device)
    texts, packages = [], ("torch", "transformers", "tokenizers", "datasets", "numpy")
    for c, (figures_found, sums) in zip(checkpoints, intrinsic, strict=True):
        begun = time.perf_counter()
        model = c.load(args, device)
        scorer = Scorer(model, c.tokenizer, args.max_length, args.batch_tokens, c.run.get("bos") if c.run else "auto")
        scores = benchmarks(scorer, items, args) if items else {}
        result = {
            "name": c.name, "split": args.split, "tasks": scores,
            "intrinsic": figures_found, "weights_sha256": c.sha256, "tokenizer_sha256": tokenizer_hash(c.tokenizer),
            "protocol": protocol, "versions": {p: version(p) for p in packages}, "run": c.run,
            "device": device_name(device),
            "wall_sec": round(time.perf_counter() - begun, 1),
        }  # fmt: skip
        texts.append(write(c.folder, result, sums))
        del model, scorer  # before the next one is loaded
    print(together([c.folder for c in checkpoints], texts, args))


def together(folders: list[Path], texts: list[str], args) -> str:
    """One table of several checkpoints that can be compared; otherwise the table of each."""
    if len(folders) == 1:
        return texts[0]
    try:
        return tabulate(list(map(str, folders)), args.reference, args.mixed, args.metric, [args.split])[0]
    except UserError as error:
        return "\n".join([*texts, f"Each by itself: {error}"])


def refuse_loss(c: Checkpoint, before: dict, protocol: dict, scoring: bool, rows, teacher: str | None) -> None:
    """Refuse to overwrite results that this call would not reproduce. `before` is the content of the result file."""
    found, there = before["intrinsic"], before["protocol"]
    changed = [f"{k} {there.get(k)} there, {v} here" for k, v in protocol.items() if there.get(k) != v]
    other_dtype = there["dtype"] != protocol["dtype"]  # one file holds scores and figures of one dtype
    if before["tasks"] and there["limit"] is None and changed and (scoring or other_dtype):
        raise UserError(f"{c.folder} holds scores of whole sets ({', '.join(changed)}); put these elsewhere by --out")
    changed = changed if other_dtype else []
    if found and rows is not None:
        if rows_hash(rows[: found["n_rows"]]) != found["rows_sha256"]:
            changed.append(f"of {found['n_rows']:,} rows that are not among the {len(rows):,} here")
        if found.get("teacher", teacher) != teacher:
            changed.append(f"teacher {found['teacher']} there, {teacher} here")
    if found and changed:
        raise UserError(
            f"{c.folder} holds figures over held-out rows ({', '.join(changed)}); put these elsewhere by --out"
        )


def rows_hash(rows: np.ndarray) -> str:
    return hashlib.sha256(rows.tobytes()).hexdigest()


def check_rows_fit(rows_dir: str, rows: np.ndarray, manifest: dict, checkpoints: list[Checkpoint]) -> None:
    """Refuse rows of another tokenizer, rows with another BOS, and rows longer than a model's context."""
    n, largest = rows.shape[1] - 1, rows[rows != PAD].max(initial=0)
    for c in checkpoints:
        if largest >= c.shape.vocab_size:
            raise UserError(
                f"{rows_dir}/val.bin: id {largest}, with a vocabulary of {c.shape.vocab_size}; prepare it again"
            )
        most = c.shape.max_position_embeddings
        if manifest["tokenizer_sha256"] != tokenizer_hash(c.tokenizer):
            raise UserError(f"{rows_dir}: rows of another tokenizer than that of {c.name}; prepare some with that one")
        if c.run and manifest.get("bos") != c.run.get("bos"):
            raise UserError(f"{rows_dir}: rows with bos={manifest.get('bos')}, but {c.name} was trained on rows with "
                            f"bos={c.run.get('bos')}; prepare some as for that run")  # fmt: skip
        if n > most:
            raise UserError(f"{rows_dir}: rows of {n} inputs, {c.name} takes {most} at most; prepare shorter ones")


def held_out_figures(
    checkpoints: list[Checkpoint], rows: np.ndarray, teacher_name: str | None, args, device: torch.device
) -> list[tuple[dict, dict]]:
    """Per checkpoint: the figures over `rows` with their provenance, and the summands per row.

    As many students as fit the free memory share a pass of the teacher.
    """
    n_vocab, room = checkpoints[0].shape.vocab_size, free_bytes(device)
    teacher, facts = None, {"n_rows": len(rows), "rows_sha256": rows_hash(rows)}
    if teacher_name:
        folder = str(find_folder(teacher_name))
        teacher = load_teacher(folder, torch.float32, device)
        facts |= {"teacher": teacher_name, "teacher_sha256": weights_hash(teacher.model)}
        padded = len(teacher.head) > n_vocab > max(load_tokenizer(folder).get_vocab().values())
        teacher = Teacher(teacher.model.to(getattr(torch, args.dtype)), device, n_vocab if padded else None)
    sizes = [(c.name, c.shape.vocab_size) for c in checkpoints] + (
        [(teacher_name, len(teacher.head))] if teacher else []
    )
    for name, n in sizes:
        if n != n_vocab:
            raise UserError(f"{name}: vocabulary of {n:,}, {checkpoints[0].name} has {n_vocab:,}")
    n_bytes = byte_lengths(checkpoints[0].tokenizer, n_vocab)
    needs = 4 * max(count(c.shape) for c in checkpoints)
    of_teacher = 4 * n_params(teacher.model) if teacher else 0
    size = max(1, min(len(checkpoints), int(0.8 * room - of_teacher) // needs))
    say(
        f"held-out rows: {size} of {len(checkpoints)} checkpoints at a time, {gib(needs)} each, and the teacher's "
        f"{gib(of_teacher)}, of {gib(room)} that are free"
    )
    found = []
    for first in range(0, len(checkpoints), size):
        models = [c.load(args, device) for c in checkpoints[first : first + size]]
        found += over_rows(models, teacher, rows, n_bytes, args.batch_tokens)
        del models  # before the next ones are loaded
    totals = [figures.figures({key: value.sum(0) for key, value in sums.items()}) for sums in found]
    facts["n_targets"] = int(found[0]["n"].sum())
    return [({k: float(v) for k, v in t.items()} | facts, sums) for t, sums in zip(totals, found, strict=True)]


def write(folder: Path, result: dict, sums: dict | None) -> str:
    """Write eval_<split>.json, .md, and .npz with the summands per row -> the Markdown.

    Earlier scores of the same weights and protocol are kept, and so are the figures over held-out rows.
    """
    stem = folder / f"eval_{result['split']}"
    file = stem.with_suffix(".json")
    before = read_if_there(file, RESULT)
    dump(file, {key: found for key, found in result.items() if key != "samples"})
    same_weights = before.get("weights_sha256") == result["weights_sha256"]
    if not same_weights or (before["protocol"] != result["protocol"] and result["tasks"]):
        for old in folder.glob(f"samples_{result['split']}_*.jsonl"):  # of scores that are replaced
            old.unlink()
    if same_weights and before["protocol"]["dtype"] == result["protocol"]["dtype"]:
        result["intrinsic"] = result["intrinsic"] or before["intrinsic"]
        if before["tasks"] and not result["tasks"]:
            result["protocol"] = before["protocol"]
        if before["protocol"] == result["protocol"]:
            scores = before["tasks"] | result["tasks"]
            result["tasks"] = {name: scores[name] for name in TASKS if name in scores}
    for name, scores in result["tasks"].items():
        if "samples" in scores:
            lines = (json.dumps(sample, default=str) + "\n" for sample in scores.pop("samples"))
            (folder / f"samples_{result['split']}_{name}.jsonl").write_text("".join(lines))
    if sums is not None:
        np.savez_compressed(stem.with_suffix(".npz"), **sums)
    elif not result["intrinsic"]:
        stem.with_suffix(".npz").unlink(missing_ok=True)
    write_whole(file, json.dumps(result, indent=1) + "\n")
    text = row_text(result)
    stem.with_suffix(".md").write_text(text)
    print(file, flush=True)
    return text


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def arguments(argv: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser(description="Score checkpoints, or tabulate what was scored.")
    add = p.add_argument
    add(
        "paths",
        nargs="+",
        metavar="PATH",
        help="out/NAME or out/NAME/METHOD, model folder or hub id; with --table: results",
    )
    add("--tasks", default="all", help="all, none, or names with commas")
    add("--split", default="heldout", choices=("heldout", "validation"), help="which of the paper's two sets")
    add("--data_dir", help="local DIR/TASK/SPLIT.jsonl, or DIR/OWNER/NAME as on the hub; else the hub itself")
    add("--storycloze", metavar="FILE", help="your copy of StoryCloze: .csv, .tsv, .jsonl, .parquet")
    add("--limit", type=int, help="score the first N items of each task alone")
    add("--rows", metavar="DIR", help="folder with val.bin for the figures over held-out rows, or none; else the run's")
    add("--max_rows", type=int, default=512, help="rows of it to read, from the first, or after --skip_rows")
    add("--skip_rows", type=int, default=0, help="rows of it to pass over: those that have chosen settings")
    add("--teacher", metavar="NAME", help="whom to compare with on those rows, or none; else the run's")
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the backbone; scores are float32")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    add("--batch_tokens", type=int, default=4096, help="tokens per forward: speed and memory only")
    add("--max_length", type=int, default=512, help="tokens that the model sees; longer requests lose their beginning")
    add("--log_samples", action="store_true", help="also write every item with its scores")
    add("--out", metavar="DIR", help="where results go; else the student's folder, or out/eval/NAME for other models")
    add("--table", action="store_true", help="print the tables of the results in PATHs")
    add("--csv", metavar="FILE", help="with --table: also write every cell, unrounded")
    add("--reference", default="pretrain", help="of tables: the method that gains are measured from")
    add("--mixed", action="store_true", help="tabulate also runs that differ in more than the method")
    add("--metric", default="acc", choices=("acc", "acc_norm"), help="of tables; acc_norm where a task has it")
    args = p.parse_args(argv)
    for key, least in (("limit", 2), ("max_rows", 1), ("skip_rows", 0), ("batch_tokens", 1), ("max_length", 1)):
        if getattr(args, key) is not None and getattr(args, key) < least:
            raise UserError(f"--{key} {getattr(args, key)}: expected at least {least}")
    if args.csv and not args.table:
        raise UserError(f"--csv {args.csv}: goes with --table")
    return args


def run(argv: list[str]) -> None:
    args = arguments(argv)
    if args.table:
        text, records = tabulate(args.paths, args.reference, args.mixed, args.metric)
        if args.csv:
            with open(args.csv, "w", newline="", encoding="utf-8") as file:
                out = csv.DictWriter(file, list(records[0]))
                out.writeheader()
                out.writerows(records)
        print(text)
        return
    device = pick_device(args.device)
    with contextlib.ExitStack() as stack:
        score(args, device, stack)


def main() -> None:
    sys.exit(configure.guard(lambda: run(sys.argv[1:])))


if __name__ == "__main__":
    main()
