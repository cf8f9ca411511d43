"""Tokenize text into fixed-length rows, cut where documents, lines or sentences end.

    python prepare.py config/alra_200m.py [--key=value ...]

After a kill, the same command resumes.

**Text to documents** (lib/documents.py). A source is a dataset on the hub or local files; several
sources form a mixture. A record that cannot be read stops the command, unless `max_bad_records`
allows it.

**Documents to ids.** Each document is tokenized as plain text: a document that spells
"<|endoftext|>" gets the ids of those characters. An EOS follows each document. A BOS stands before
it if the tokenizer itself adds one to a text (unless that BOS is the EOS, or `bos="none"`).

**Ids to rows.** The ids of all documents form one stream. `row_ends`, the boundary rule, cuts the
stream into rows of at most `row_len` = seq_len + 1 ids. Concatenated, the rows are the stream
again. Cutting stops after the last document, or as soon as there are `train_rows` + `val_rows`
rows. `val_rows` rows go to val.bin, all others to train.bin: with `train_rows`, those after the
training rows; without it, every n-th row of the text. With `val_share` instead, whole documents are
held out by a hash of their text. These documents form a second stream.

**Rows to files.** `<data_dir>/train.bin` and `val.bin` hold uint32 ids [rows, row_len], with PAD in
the unused tail of a row. The manifests `train.json` and `val.json` say where the rows come from and
what was skipped, with counts and hashes. Until all four are complete, the unfinished work is in
`*.bin.tmp` and `prepare.state`.
"""

import ctypes
import hashlib
import itertools
import math
import os
import re
import shlex
from array import array
from dataclasses import dataclass
from pathlib import Path

import configure

if __name__ == "__main__":
    configure.check_flags()

import numpy as np
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from lib.documents import open_source, read_document
from lib.errors import UserError, note
from lib.files import flush, for_json, locked, read_json, text_hash, write_json, writing
from lib.hf import load_tokenizer, pinned, tokenizer_hash
from lib.rows import PAD, open_rows, quick_hash, read_ahead, read_manifest
from lib.source import edited, hashes, loaded_sources, merged
from lib.stats import half_interval
from lib.tokens import leading_bos, loss_of, token_bytes

RULE_VERSION = 1  # version of the boundary rule
HELD_OUT_VERSION = 2  # version of the choice of held-out documents and rows
BATCH_BYTES = 1 << 22  # of stored documents; the state is saved after each batch
RECIPE_KEYS = (
    "source_config",
    "source_text",
    "source_split",
    "mixture_end",
    "n_documents",
    "train_rows",
    "val_rows",
    "val_share",
)


def main(argv) -> int:
    cfg = configure.load(argv)
    prepare(cfg)
    words = [*argv]
    given = " ".join(argv)
    if "--data_dir" in given and "--out_dir" not in given:  # a folder of rows has its own run
        words.append(f"--out_dir=out/{Path(cfg.data_dir).name}")
    n_rows = read_manifest(cfg.data_dir, "train")["rows"]
    if cfg.max_steps * cfg.batch_rows > n_rows and not cfg.repeat_rows:
        words.append("--repeat_rows=True")
    print(f"next: python train.py {shlex.join(words)}")
    return 0


def prepare(cfg):
    """Write the rows of `cfg` into `cfg.data_dir`, or resume a killed run of the same recipe.

    Raises `UserError` if the folder holds data of another recipe, complete or not. Nothing is
    overwritten.
    """
    if "," in cfg.data_dir:
        raise UserError(f"data_dir={cfg.data_dir}: prepare.py writes one folder; name one of them")
    if not (cfg.val_rows or cfg.val_share):
        raise UserError("val_rows=0 with val_share=0: training needs held-out rows; set either")
    name = cfg.tokenizer_name()
    tokenizer = load_tokenizer(name)
    bos = leading_bos(tokenizer) if cfg.bos == "auto" else None
    source, facts = open_source(cfg)
    eos = tokenizer.eos_token_id
    recipe = {  # everything that determines the rows
        "sources": facts,
        **{key: getattr(cfg, key) for key in RECIPE_KEYS},
        "row_len": cfg.seq_len + 1,
        "rule_version": RULE_VERSION,
        "held_out_version": HELD_OUT_VERSION,
        "tokenizer": pinned(name),
        "tokenizer_sha256": tokenizer_hash(tokenizer),
        "vocab_size": max(tokenizer.get_vocab().values()) + 1,
        "bos": None if bos == eos else bos,
        "eos_id": eos,
        "code": hashes(loaded_sources()) | {"losses.py": ""},  # which makes no rows
    }
    folder = Path(cfg.data_dir)
    if (folder / "train.json").exists() and not (folder / "prepare.state").exists():
        # finished: no lock, so the folder may be read-only
        check_recipe(folder, open_rows(folder, "train")[1], recipe)
        print(f"{folder}: already prepared with the same settings")
        return
    with locked(folder, f"{folder}: another prepare.py is at work there"):
        state = open_state(folder, recipe)
        if "complete" not in state:
            write_rows(cfg, source, tokenizer, state)
        finish(folder, state)


def write_rows(cfg, source, tokenizer, state):
    """Read, tokenize, cut and write until all rows exist or the documents end.

    state  the progress that prepare.state holds (`open_state`); updated here
    """
    folder = Path(cfg.data_dir)
    n_rows = state["rows"]
    max_rows = (cfg.train_rows or math.inf) + cfg.val_rows
    n_left = cfg.n_documents and cfg.n_documents - state["records"]  # to read at most; None: all
    table = token_table(tokenizer)
    for split in n_rows:
        shorten(folder, state, split)  # removes rows that the state did not count before a kill
    if "source" in state:
        source.load_state_dict(state["source"])
    loader = DataLoader(
        Encoder(tokenizer, state["recipe"]),
        batch_size=None,
        sampler=read_ahead(read_batches(source, state["records"], n_left)),
        collate_fn=tuple,  # which leaves arrays as they are
        num_workers=cfg.workers,
        # a fork would keep the lock, and a server of forks would outlive this process
        multiprocessing_context="spawn" if cfg.workers else None,
        worker_init_fn=start_worker,
    )
    with tqdm(total=max_rows, unit="row") as bar:
        for ids, bad, progress in loader:
            state["skipped"] += bad
            if len(state["skipped"]) > cfg.max_bad_records:
                problem = state["skipped"][cfg.max_bad_records]
                raise UserError(
                    f"{problem}; correct it, or set max_bad_records above {cfg.max_bad_records}"
                )
            for split in n_rows:
                cut_rows(folder, state, split, table, ids[split])
            bar.update(n_rows["train"] - bar.n)
            state.update(progress)
            if n_rows["train"] >= max_rows:
                break  # the state is saved below, and then counts max_rows at most
            write_json(folder / "prepare.state", state)
    for split in n_rows:  # the ids that remain are a last row
        cut_rows(folder, state, split, table, last=True)
    n_rows["train"] = min(n_rows["train"], max_rows)  # `finish` cuts the others
    state["complete"] = True
    write_json(folder / "prepare.state", state)


# --- Documents to ids


def read_batches(source, n_read, n_documents):
    """Yield the next documents in batches: what `Encoder` takes. `n_read` have been read before."""
    documents = itertools.islice(source, n_documents)
    while batch := list(next_batch(documents)):
        n_read += len(batch)
        yield batch, {"records": n_read, "source": source.state_dict()}


def next_batch(documents):
    """Yield documents as stored, until they have BATCH_BYTES together."""
    size = 0
    for document in documents:
        yield document["stored"]
        size += len(document["stored"]) + 500  # a short document takes memory too
        if size >= BATCH_BYTES:
            break


def start_worker(_):
    """Make a worker end with the process that started it, and tokenize in one thread."""
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


@dataclass
class Encoder:
    """Reads and tokenizes batches of stored documents, possibly in another process."""

    tokenizer: PreTrainedTokenizerFast
    recipe: dict

    def __getitem__(self, batch):
        """Return what a batch adds to the streams, what is wrong in it, and the new progress.

        batch  stored documents; the entries of `open_state` that say how much has been read then
        ->     by split, the ids [n] uint32 of the documents, each with BOS and EOS; a message for
               each document that cannot be read, or whose ids lose some of its text; these entries
        """
        stored, progress = batch
        first = progress["records"] - len(stored)
        recipe = self.recipe
        bos = {recipe["bos"]} - {None}
        eos = recipe["eos_id"]
        spelt = self.tokenizer.eos_token
        backend = self.tokenizer.backend_tokenizer
        # the library's words for: "<|endoftext|>" in a text is encoded as its characters
        backend.encode_special_tokens = True  # a copy in another process does not have it
        documents = [read_document(each) for each in stored]
        texts = [text for text, _, _ in documents]
        if not first and any(spelt in text for text in texts):
            note(
                f"warning: a document spells {spelt!r}, which stays text; if it separates "
                "documents, write a file with a record for each"
            )
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        ids_of = [encoding.ids for encoding in encodings]
        decoded = backend.decode_batch(ids_of, skip_special_tokens=False)
        streams = {"train": array("I"), "val": array("I")}
        problems = []
        parts = zip(itertools.count(first), documents, ids_of, decoded)
        for i, (text, where, bad), ids, result in parts:
            bad = bad or loss_of(text, result)
            if eos in ids:  # of a tokenizer whose EOS is an ordinary token
                bad = (
                    "tokenizer: a text contains its eos_token; take one whose eos_token is special"
                )
            if bad:
                problems.append(f"document {i}: {where}{bad}")
            else:
                split = "val" if held_out(text, recipe["val_share"]) else "train"
                streams[split].extend([*bos, *ids, eos])
        return streams, problems, progress


def held_out(text, share):
    """Return whether a document is held out, by a hash of its text: a copy is where it is."""
    return int(text_hash(text)[:16], 16) < share * 2**64


# --- Ids to rows

STOPS = ".!?…‼⁇⁈⁉؟۔।。！？｡"
WIDE = "。！？｡"
CLOSERS = "\"'”’»›)]}」』】》〉〕）］｝"
INCOMPLETE = "\ufffd"  # what a part of a character's UTF-8 bytes decodes to
WORDS = (  # abbreviations in lower case, without the last full stop
    "mr mrs ms mx dr prof rev fr hon gen col capt cmdr lt maj sgt gov sen rep pres st sr jr esq "
    "messrs mme mlle vs viz etc al ca cf approx resp incl excl ibid no nos vol vols ch chap sec "
    "fig figs eq eqs pp ed eds jan feb mar apr jun jul aug sep sept oct nov dec mon tue tues wed "
    "thu thurs fri sat inc ltd co corp dept univ assn bros ave blvd rd mt ft ph.d"
)
ABBREVIATIONS = set(WORDS.split())
# The class of a token is the sum of these bits.
EOS = 1
LINE = 2  # ends a line
STOP = 4  # may end a sentence; the tokens around it decide
SPACE = 8  # starts with whitespace
FRESH = 16  # starts with a whole character that is neither a stop nor a closer
GAP = 32  # contains whitespace or is an EOS, so that no word before a full stop spans it


def row_ends(ids, table, row_len, last):
    """Return where the rows of a piece of the stream end, by the boundary rule (RULE_VERSION 1).

    The paper (appendix C, "Tokenization and Boundary-Aware Chunk Construction") fills a chunk and
    searches backward for its latest acceptable boundary: an EOS, a newline, or the end of a
    sentence that passes checks against abbreviations. It leaves open what those checks are. Here
    a row is cut after the latest of the next `row_len` ids of the stream that ends

      1. a document: it is an EOS; or
      2. a line: the token's text, without trailing spaces and tabs, ends in a line feed. So CR LF
         counts, and a lone CR does not; or
      3. a sentence: the text up to this id ends in STOPS and then any number of CLOSERS, and the
         next token of the stream (for the last of the `row_len` ids, the one after them) starts
         with whitespace. If the last stop is in WIDE, whose scripts write no whitespace, the next
         token may start with any whole character that is not in STOPS or CLOSERS.
         A single "." does not end a sentence after some words. A *word* is what stands before the
         full stop, back to the first character that is neither a letter, a digit nor a full stop,
         or to the start of the document or row. These words are
           - one letter or digit, as in "J. Smith";
           - two or three digits, as in "12. The", since that may be a label;
           - single letters with full stops between them, as in "U.S." and "e.g.";
           - those in ABBREVIATIONS.
         "..." and "?!" always end a sentence.

    Without a boundary the row keeps all `row_len` ids. A boundary after the first id of a row does
    not count, since a row of one id has no target. What is left when the stream ends is the last
    row. A cut depends on the next `row_len` + 1 ids of the stream alone, not on batches or kills.

    ids     [n] an array: the stream from the start of a row on
    table   of `token_table`
    last    whether the stream ends with these ids; otherwise up to row_len of them are left over
    ->      the end of each row (exclusive), where the next row starts
    """
    classes, pieces = table
    flags = classes[ids].tobytes()
    ends = []
    start = 0
    while start + row_len < len(ids):  # not <=, since `ends_row` needs the id after a window
        end = start + row_len
        for i in range(end - 1, start, -1):
            if ends_row(ids, flags, pieces, start, i):
                end = i + 1
                break
        ends.append(end)
        start = end
    if last and start < len(ids):
        ends.append(len(ids))
    return ends


def ends_row(ids, flags, pieces, start, i):
    """Return whether a row that begins at `start` may end after ids[i]."""
    if flags[i] & (EOS | LINE):
        return True
    following = flags[i + 1]  # `row_ends` searches a window only if an id stands after it
    if not flags[i] & STOP or not following & FRESH:
        return False
    # No word reaches back beyond whitespace. The cost is linear: where whitespace follows, as
    # where another FRESH token follows, no token is read from two places.
    before = GAP if following & SPACE else GAP | FRESH
    first = i
    while first > start and not flags[first] & before:
        first -= 1
    piece = b"".join(pieces[j] for j in ids[first : i + 1])
    text = piece.decode("utf-8", "replace").rstrip(CLOSERS)
    head = text.rstrip(STOPS)
    stops = text[len(head) :]
    if not stops:
        return False
    if not following & SPACE and stops[-1] not in WIDE:
        return False
    if stops != ".":
        return True
    word = re.split(r"[^\w.]|_", head)[-1]
    is_label = len(word) == 1 or (len(word) <= 3 and word.isdecimal())
    is_initials = all(len(part) == 1 and part.isalpha() for part in word.split("."))
    return not (is_label or is_initials or word.lower() in ABBREVIATIONS)


def token_table(tokenizer):
    """Return the classes [V] uint8 of a tokenizer's tokens, and their bytes."""
    pieces = token_bytes(tokenizer)
    classes = np.array([*map(token_class, pieces)], np.uint8)
    classes[tokenizer.eos_token_id] = EOS | GAP
    return classes, pieces


def token_class(piece):
    """Return the class of a token that stands for these bytes."""
    if not piece:
        return 0
    text = piece.decode("utf-8", "replace")
    bits = 0
    if text[0].isspace():
        bits |= SPACE
    if text[0] not in STOPS + CLOSERS + INCOMPLETE:
        bits |= FRESH
    if re.search(r"\s", text):
        bits |= GAP
    last = text.rstrip(CLOSERS + INCOMPLETE)[-1:]
    if not last or last in STOPS:  # nothing but closers: the stop may be in the token before
        bits |= STOP
    elif piece.rstrip(b" \t").endswith(b"\n"):
        bits |= LINE
    return bits


# --- Rows to files


def cut_rows(folder, state, split, table, ids=(), last=False):
    """Add ids to a stream, and write its complete rows to the disk; of its last ids, all rows."""
    row_len = state["recipe"]["row_len"]
    ids = np.concatenate((state["ids"][split], ids), dtype=np.uint32, casting="unsafe")
    starts = [0, *row_ends(ids, table, row_len, last)]
    lengths = np.diff(starts)
    rows = np.full((len(lengths), row_len), PAD, np.uint32)
    # fills the rows in order, lengths[i] ids each
    rows[np.arange(row_len) < lengths[:, None]] = ids[: starts[-1]]
    file = folder / f"{split}.bin.tmp"
    with writing(file):
        with open(file, "ab") as stored:
            stored.write(rows)
        flush(file)  # before the state counts them
    state["rows"][split] += len(rows)
    state["ids"][split] = ids[starts[-1] :].tolist()


def shorten(folder, state, split):
    """Cut a file of unfinished rows to the rows that the state counts.

    Raises `UserError` if the file is shorter than that.
    """
    file = folder / f"{split}.bin.tmp"
    size = state["rows"][split] * state["recipe"]["row_len"] * 4
    with writing(file), open(file, "ab") as stored:
        if stored.tell() < size:
            raise UserError(f"{file}: too short for prepare.state; move {folder} aside")
        stored.truncate(size)


def open_state(folder, recipe):
    """Return the state of the unfinished work in a folder, or that of work that begins there.

    The state is what prepare.state holds:

    recipe    everything that determines the rows
    records   the number of records read
    skipped   a message for each record that could not be read
    source    the position in the source
    rows      by split, the number of rows written
    ids       by split, the ids that are in no row yet
    complete  there if all rows are written, and only `finish` is left to do

    Raises `UserError` if the folder holds unfinished work of another recipe, or other rows.
    """
    file = folder / "prepare.state"
    if file.exists():
        state = read_json(file, ["ids"], f"move {folder} aside and start again")
        check_recipe(folder, state["recipe"], recipe)
        note(f"{folder}: resuming after {state['records']:,} documents")
        code = merged(state["recipe"].get("code", {}), recipe["code"])
        return state | {"recipe": recipe | {"code": code}}  # names in the recipe may be new
    for name in ("train.bin", "val.bin"):
        if (folder / name).exists():
            raise UserError(f"{folder}: contains {name}, not of prepare.py; move it aside")
    splits = ["train", "val"] if recipe["val_share"] else ["train"]
    rows = dict.fromkeys(splits, 0)
    ids = {split: [] for split in splits}
    return {"recipe": recipe, "records": 0, "skipped": [], "rows": rows, "ids": ids}


def remove_work(folder):
    for name in ("train.bin.tmp", "val.bin.tmp", "prepare.state"):
        (folder / name).unlink(missing_ok=True)


def check_recipe(folder, old, new):
    """Raise `UserError` if recipes differ.

    The names of tokenizer and sources may differ, as long as their hashes agree. Edits of code are
    shown.
    """

    def content(recipe):
        sources = [part | {"source": None} for part in recipe["sources"]]
        return recipe | {"tokenizer": None, "sources": sources, "code": None}

    names = edited(old.get("code", {}), new["code"])
    if names:
        note(f"{folder}: edited since these rows were begun: {', '.join(names)}")

    changes = []
    for key, value in content(new).items():
        if content(old).get(key) != value:
            changes.append(f"{key} was {old.get(key)!r:.200}, now {new[key]!r:.200}")
    if changes:
        raise UserError(
            f"{folder}: holds data of another recipe: {'; '.join(changes)}. Set another data_dir, "
            "or move that folder aside"
        )


def finish(folder, state):
    """Give the files their final names and write their manifests. Safe to repeat after a kill."""
    recipe = state["recipe"]
    n_rows = state["rows"]
    held = held_out_rows(recipe, n_rows["train"])
    if recipe["val_rows"]:
        n_rows = {"train": n_rows["train"] - len(held), "val": len(held)}
    hold_out = f"--val_share=0 --val_rows={max(1, sum(n_rows.values()) // 10)}"
    for split, n in n_rows.items():
        if not n:
            remove_work(folder)  # else the same command would resume, and end here again
            raise UserError(
                f"{folder}: {state['records']:,} records leave no row for {split}; set {hold_out}, "
                "and if that is not enough, a smaller --seq_len, which makes more rows"
            )
    for split in state["rows"]:
        work = folder / f"{split}.bin.tmp"
        if work.exists():
            shorten(folder, state, split)
            if recipe["val_rows"]:
                divide_rows(folder, recipe, held)
            else:
                os.replace(work, folder / f"{split}.bin")
    facts, counts, n_eos = measure(folder / "train.bin", recipe)
    write_manifest(folder, "train", state, facts)
    facts, _, _ = measure(folder / "val.bin", recipe)
    facts |= measure_unigram(folder / "val.bin", recipe, counts)
    if recipe["val_rows"] and not recipe["train_rows"]:
        # the number of documents that end in the training rows before each held-out row, which
        # tells whether two of these rows are of one document
        n_ended = np.cumsum(np.insert(n_eos, 0, 0))
        facts["ended_in_train"] = n_ended[held - np.arange(len(held))].tolist()
        print("training rows come from the held-out documents too, so held-out CEs will be low")
    elif recipe["val_share"] and (state["records"] < 100 or facts["rows"] < 20):
        print(f"few documents: with another data_dir, {hold_out} holds out rows of all of them")
    write_manifest(folder, "val", state, facts)
    remove_work(folder)


def held_out_rows(recipe, n_rows) -> np.ndarray:
    """Return which rows of the text to hold out for `val_rows`, in rising order.

    With `train_rows`, they are the ones after the training rows. Without it, they are spread evenly
    over the text, so that they come from as many of its documents as they can.
    """
    n = min(recipe["val_rows"], n_rows)
    if recipe["train_rows"]:
        return np.arange(n_rows - n, n_rows)
    return np.arange(1, 2 * n, 2) * n_rows // (2 * n)  # none if n is 0


def divide_rows(folder, recipe, held):
    """Write the rows of train.bin.tmp to train.bin, and the `held` ones to val.bin."""
    rows = np.memmap(folder / "train.bin.tmp", np.uint32, "r").reshape(-1, recipe["row_len"])
    kept = np.delete(np.arange(len(rows)), held)
    for split, index in (("train", kept), ("val", held)):
        file = folder / f"{split}.bin"
        with writing(file):
            with open(file, "wb") as stored:
                for part in np.array_split(index, len(index) // 4096 + 1):
                    stored.write(rows[part])
            flush(file)


def measure(file, recipe):
    """Return counts and hashes of a rows file, the number of targets by id, and of EOS by row."""
    row_len = recipe["row_len"]
    counts = np.zeros(recipe["vocab_size"], np.int64)
    n_eos = []
    digest = hashlib.sha256()
    with open(file, "rb") as blocks:  # pages of np.memmap would count as the process's memory
        while block := blocks.read(1024 * row_len * 4):
            digest.update(block)
            ids = np.frombuffer(block, np.uint32).reshape(-1, row_len)
            n_eos.append((ids == recipe["eos_id"]).sum(1))
            targets = ids[:, 1:]
            counts += np.bincount(targets[targets != PAD], minlength=len(counts))
    n_eos = np.concatenate(n_eos)
    n_rows = len(n_eos)
    n_targets = int(counts.sum())
    n_tokens = n_targets + n_rows  # the first id of a row is no target
    facts = {
        "rows": n_rows,
        "tokens": n_tokens,
        "valid_targets": n_targets,
        "padding_share": 1 - n_tokens / (n_rows * row_len),
        "documents": int(n_eos.sum()),  # that end in these rows
        "sha256": digest.hexdigest(),
        "quick_sha256": quick_hash(file),
    }
    return facts, counts, n_eos


def measure_unigram(file, recipe, counts):
    """Return the CE of a model that knows token frequencies alone, and half its 95 % interval.

    A token's probability is its frequency among the training targets, with add-one smoothing.

    file    of the held-out rows
    counts  of the training targets (`measure`)
    """
    counts = counts + 1
    nats = math.log(counts.sum()) - np.log(counts)
    nats = np.append(nats, 0.0)  # of padding
    rows = np.fromfile(file, np.int32).reshape(-1, recipe["row_len"])
    targets = rows[:, 1:]  # PAD is -1 as an int32: the last of `nats`
    ce = nats[targets].sum(1)  # [rows], of all targets of a row
    n = (targets >= 0).sum(1)  # [rows], the number of targets
    facts = {"unigram_ce": ce.sum() / n.sum(), "unigram_half": half_interval(ce, n)}
    return for_json(facts)  # without an interval if there are few rows


def write_manifest(folder, split, state, facts):
    """Write the manifest of a split, and print what it has."""
    manifest = {"split": split, **state["recipe"], "skipped": state["skipped"], **facts}
    write_json(folder / f"{split}.json", manifest)
    line = (
        f"{folder / split}.bin: {facts['rows']:,} rows, {facts['tokens']:,} tokens, "
        f"{facts['documents']:,} ends of documents, padding {facts['padding_share']:.1%}"
    )
    if facts.get("unigram_ce"):
        line += f", unigram CE {facts['unigram_ce']:.4f}"
    if facts.get("unigram_half"):
        line += f" ± {facts['unigram_half']:.4f} (95 % over rows)"
    print(line)


if __name__ == "__main__":
    configure.run(main)
