"""Tokenize text into fixed-length rows, cut where documents, lines or sentences end.

    python prepare.py config/alra_200m.py [--key=value ...]   write the rows, or resume after a kill
    python prepare.py --verify data/pile                      hash and count everything again
    python prepare.py --show 1000 data/pile                   print five rows from row 1000 on

**Text to documents.** A source is a dataset on the hub or local files; several sources form a
mixture. A record that cannot be read stops the command, unless `max_bad_records` allows it.

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

import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
import sys
from pathlib import Path

import configure

if __name__ == "__main__" and sys.argv[1:2] not in (["--verify"], ["--show"]):
    configure.check_flags()

import numpy as np
from tqdm import tqdm

from lib.documents import SUFFIXES, list_files, read_document, read_files
from lib.errors import UserError, naming_files, note
from lib.files import (
    flush,
    for_json,
    locked,
    read_json,
    reading,
    text_hash,
    working_name,
    write_json,
    writing,
)
from lib.hf import find_folder, load_tokenizer, pinned, tokenizer_hash
from lib.rows import PAD, open_rows, quick_hash, read_ahead
from lib.settings import Positive, checked
from lib.stats import half_interval
from lib.tokens import (
    check_bos,
    check_tokenizer,
    encode_texts,
    leading_bos,
    space_spelling,
    spelled_spaces,
    token_bytes,
)

RULE_VERSION = 1  # version of the boundary rule
HELD_OUT_VERSION = 2  # version of the choice of held-out documents and rows
BATCH_CHARS = 1 << 22  # the state is saved after each batch of documents: a kill loses one at most
HUB_ID = r"[\w-][\w.-]*(/[\w.-]+)?(@[\w./-]+)?"
SHARE = r"\s*(.+):(?=.*[1-9])(\d*\.?\d+)\s*"  # NAME:SHARE; the lookahead refuses a share of 0
CHAT = r"im_end|eot|turn|\|end\|"  # matches an EOS that ends a turn of a chat
WORK_FILES = ("train.bin.tmp", "val.bin.tmp", "prepare.state")
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
    match argv:
        case ["--verify", folder]:
            verify(Path(folder))
        case ["--show", row, folder] if row.isdecimal():
            show(Path(folder), int(row))
        case ["--verify" | "--show", *_]:
            raise UserError(
                f"{' '.join(argv)}: expected --verify DIR, or --show N DIR from row N on"
            )
        case _:
            prepare(configure.load(argv))
    return 0


def prepare(cfg):
    """Write the rows of `cfg` into `cfg.data_dir`, or resume a killed run of the same recipe.

    Raises `UserError` if the folder holds data of another recipe, complete or not. Nothing is
    overwritten.
    """
    if "," in cfg.data_dir:
        raise UserError(f"data_dir={cfg.data_dir}: prepare.py writes one folder; name one of them")
    tokenizer, tokenizer_name, bos = open_tokenizer(cfg)
    source, facts = open_source(cfg)
    eos = tokenizer.eos_token_id
    recipe = {  # everything that determines the rows
        "sources": facts,
        **{key: getattr(cfg, key) for key in RECIPE_KEYS},
        "row_len": cfg.seq_len + 1,
        "rule_version": RULE_VERSION,
        "held_out_version": HELD_OUT_VERSION,
        "tokenizer": tokenizer_name,
        "tokenizer_sha256": tokenizer_hash(tokenizer),
        "vocab_size": max(tokenizer.get_vocab().values()) + 1,
        "bos": None if bos == eos else bos,
        "eos_id": eos,
    }
    folder = Path(cfg.data_dir)
    if is_prepared(folder, recipe):  # needs no lock, so the folder may be read-only
        print(f"{folder}: already prepared with the same settings; --verify checks it")
        return
    with locked(folder, f"{folder}: another prepare.py is at work there"):
        state = open_state(folder, recipe)
        if "complete" not in state:
            write_rows(cfg, source, tokenizer, state)
        finish(folder, state, cfg.source)


def write_rows(cfg, source, tokenizer, state):
    """Read, tokenize, cut and write until all rows exist or the documents end.

    state  the progress that prepare.state holds (`open_state`); updated here
    """
    folder = Path(cfg.data_dir)
    writers = state["writers"]
    max_rows = math.inf
    if cfg.train_rows is not None:
        max_rows = cfg.train_rows + cfg.val_rows
    n_left = (cfg.n_documents or sys.maxsize) - state["records"]  # documents to read at most
    table = token_table(tokenizer)
    backend = tokenizer.backend_tokenizer
    # the library's words for: "<|endoftext|>" in a text is encoded as its characters
    backend.encode_special_tokens = True
    for split in writers:
        shorten(folder, state, split)  # removes the rows that a kill left after the last commit
    if "source" in state:
        source.load_state_dict(state["source"])
    warns = True
    n_ended = 0  # parts of a mixture that have no more documents
    with tqdm(total=max_rows, unit="row") as bar:
        for documents, position in read_ahead(read_batches(source, n_left)):
            ids = encode(backend, documents, state, cfg.max_bad_records)
            if warns and any(tokenizer.eos_token in document["text"] for document in documents):
                warns = False
                note(
                    f"warning: a document spells {tokenizer.eos_token!r}, which stays text; if "
                    "it separates documents, write a file with a record for each"
                )
            for split in writers:
                add_ids(folder, state, split, table, ids[split])
            n_rows = writers["train"]["rows"]  # of which the last `val_rows` are held out below
            bar.update(n_rows - bar.n)
            state["source"] = position
            ended = position["examples_iterable"].get("is_exhausted", [])
            if n_ended < sum(ended) < len(ended):
                n_ended = sum(ended)
                say_ended(state["recipe"], ended)
            if n_rows >= max_rows:
                break  # without a commit: the next one counts max_rows at most
            commit(folder, state)
    for split in writers:  # the ids that remain are a last row
        add_ids(folder, state, split, table, [], last=True)
    writers["train"]["rows"] = min(writers["train"]["rows"], max_rows)  # `finish` cuts the others
    state["complete"] = True
    commit(folder, state)


# --- Text to documents


def open_source(cfg):
    """Return a stream of the documents of `cfg.source`, and the facts of each of its parts.

    The stream is a `datasets.IterableDataset`, whose state resumes it. A mixture draws from its
    parts with the probabilities of their shares, by a fixed seed.
    """
    import datasets

    parts = split_mixture(cfg.source)
    streams = []
    facts = []
    for part in parts:
        remedy = "expected name, share; text, config, split, revision"
        with reading(f"source: {part}", remedy), naming_files():
            stream, fact = open_part(cfg, **part)
        streams.append(stream)
        facts.append(fact)
    if len(parts) == 1:
        return streams[0], facts
    shares = np.array([checked("share", part.get("share"), Positive) for part in parts])
    shares = (shares / shares.sum()).tolist()
    for fact, share in zip(facts, shares, strict=True):
        fact["share"] = share
    end = "first_exhausted"
    if cfg.mixture_end == "all":
        end = "all_exhausted_without_replacement"  # reads no document twice
    return datasets.interleave_datasets(streams, shares, seed=0, stopping_strategy=end), facts


def split_mixture(source) -> list[dict]:
    """Return the arguments of `open_part` for each part of a mixture, a list or "a:7,b:3".

    A text that is no mixture, or an existing file or folder, is its only part.
    """
    if not isinstance(source, str):
        return source
    parts = [re.fullmatch(SHARE, part) for part in source.split(",")]
    if not any(parts) or os.path.exists(os.path.expanduser(source)):
        return [{"name": source}]
    if not all(parts):
        raise UserError(f"source={source}: expected a share above 0 for each, as in a:0.7,b:0.3")
    return [{"name": part[1], "share": float(part[2])} for part in parts]


def open_part(cfg, name, share=1.0, revision=None, **own):
    """Return a stream of the documents of a source, and its name with a hash of its content.

    share     is for the mixture, and changes nothing here
    revision  of a hub dataset, as in NAME@REVISION
    own       its text field, configuration and split, where they are not those of the config
    """
    import datasets

    cfg = dataclasses.replace(cfg, **{f"source_{key}": value for key, value in own.items()})
    is_file = os.path.exists(os.path.expanduser(name)) or name.endswith(SUFFIXES)
    if is_file or not re.fullmatch(HUB_ID, name):  # a file, a folder, or a pattern: data/*.gz
        if own.keys() & {"config", "split"} or cfg.source_split != "train" or revision:
            raise UserError(
                f"source={name}: split, config and revision are for the hub; name the files to "
                f"read, as in {name}/train-*.parquet"
            )
        files = list_files(name)
        content = [quick_hash(Path(file)) for file in files]
        arguments = {"files": files, "column": cfg.source_text}
        texts = dict.fromkeys(("where", "text", "bad"), datasets.Value("string"))
        stream = datasets.IterableDataset.from_generator(
            read_files, datasets.Features(texts), gen_kwargs=arguments
        )
    else:
        stream, name = open_hub(name, revision, cfg)
        content = name  # the commit in it stands for the content
    return stream, {"source": name, "sha256": text_hash(json.dumps(content)), **own}


def open_hub(name, revision, cfg):
    """Return a stream of the documents of a dataset on the hub, and its name with its commit."""
    import datasets
    import huggingface_hub

    column = cfg.source_text
    dataset, _, named = name.partition("@")
    revision = revision or named or None
    remedy = "expected a file or a hub dataset; without a network: --source=demo/text.jsonl.zst"
    with reading(f"source={dataset}", remedy):
        commit = huggingface_hub.HfApi().dataset_info(dataset, revision=revision).sha
        rows = datasets.load_dataset(
            dataset, cfg.source_config, split=cfg.source_split, streaming=True, revision=commit
        )
    documents = rows.map(lambda row: read_document(row, column))
    return documents.select_columns(["where", "text", "bad"]), f"{dataset}@{commit}"


def say_ended(recipe, ended):
    """Print which parts of a mixture have ended before the others: `ended` has a bool for each."""
    names = [part["source"] for part in recipe["sources"]]
    print(f"source: {', '.join(itertools.compress(names, ended))} ended before the others")
    if not recipe["mixture_end"]:
        print("the mixture ends here; --mixture_end=all goes on until its last part ends")


# --- Documents to ids


def open_tokenizer(cfg):
    """Return the tokenizer, its name (for a hub id, with its commit), and its BOS, if it has one.

    With `bos=none` there is no BOS.
    """
    name = cfg.tokenizer_name()
    tokenizer = load_tokenizer(name)
    if re.search(CHAT, tokenizer.eos_token):
        note(
            f"warning: {name}: its EOS {tokenizer.eos_token}, which will end documents, ends "
            "turns of a chat; take the base model's"
        )
    folder = find_folder(name)
    check_tokenizer(tokenizer, folder)
    bos = None
    if cfg.bos == "auto":
        bos = leading_bos(tokenizer)
        check_bos(bos, folder)
    return tokenizer, pinned(name), bos


def read_batches(source, n_documents):
    """Yield the next documents in batches, each with the source's position after the batch."""
    batch = []
    size = 0
    for document in itertools.islice(source, n_documents):
        batch.append(document)
        size += len(document["text"]) + 500  # a short document takes memory too
        if size >= BATCH_CHARS:
            yield batch, source.state_dict()
            batch = []
            size = 0
    if batch:
        yield batch, source.state_dict()


def encode(backend, documents, state, max_bad_records):
    """Return the ids of the documents, each with BOS and EOS, by split.

    Counts the records in `state`, and lists those that cannot be read, or whose ids spell another
    text. Raises `UserError` if there are more of these than `max_bad_records`.
    """
    recipe = state["recipe"]
    bos = [] if recipe["bos"] is None else [recipe["bos"]]
    eos = recipe["eos_id"]
    texts = [document["text"] for document in documents]
    ids_of = {"train": [], "val": []}
    for document, encoded in zip(documents, encode_texts(backend, texts), strict=True):
        ids, change = encoded
        bad = document["bad"] or change
        if eos in ids:  # of a tokenizer whose EOS is an ordinary token
            bad = "tokenizer: a text contains its eos_token; take one whose eos_token is special"
        if bad:
            problem = f"document {state['records']}: {document['where']}{bad}"
            state["skipped"].append(problem)
            if len(state["skipped"]) > max_bad_records:
                raise UserError(
                    f"{problem}; correct it, or set max_bad_records above {max_bad_records}"
                )
        else:
            split = "val" if held_out(document["text"], recipe["val_share"]) else "train"
            ids_of[split] += [*bos, *ids, eos]
        state["records"] += 1
    return ids_of


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
    classes, pieces, spelling = table
    flags = classes[ids]
    flags[spelled_spaces(ids, spelling)] = token_class(b" ")
    flags = flags.tolist()
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
    """Return the classes [V] uint8 of a tokenizer's tokens, their bytes, and `space_spelling`."""
    pieces = token_bytes(tokenizer)
    classes = np.array([token_class(piece) for piece in pieces], np.uint8)
    classes[tokenizer.eos_token_id] = EOS | GAP
    return classes, pieces, space_spelling(tokenizer.backend_tokenizer)


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


def add_ids(folder, state, split, table, ids, last=False):
    """Add ids to a stream, and write the rows that are complete; after its last ids, all rows."""
    row_len = state["recipe"]["row_len"]
    writer = state["writers"][split]
    ids = np.array(writer["rest"] + ids, np.uint32)
    starts = np.array([0, *row_ends(ids, table, row_len, last)])
    lengths = np.diff(starts)
    rows = np.full((len(lengths), row_len), PAD, np.uint32)
    # fills the rows in order, lengths[i] ids each
    rows[np.arange(row_len) < lengths[:, None]] = ids[: starts[-1]]
    file = folder / f"{split}.bin.tmp"
    with writing(file), open(file, "ab") as stored:
        stored.write(rows)
    writer["rows"] += len(rows)
    writer["rest"] = ids[starts[-1] :].tolist()


def shorten(folder, state, split):
    """Cut a file of unfinished rows to the rows that the state counts.

    Raises `UserError` if the file is shorter than that.
    """
    file = folder / f"{split}.bin.tmp"
    file.touch()
    size = state["writers"][split]["rows"] * state["recipe"]["row_len"] * 4
    if file.stat().st_size < size:
        raise UserError(f"{file}: too short for prepare.state; move {folder} aside")
    os.truncate(file, size)


def is_prepared(folder, recipe) -> bool:
    """Return whether a folder holds the finished rows. Raises `UserError` for another recipe's."""
    finished = (folder / "train.json").exists() and not (folder / "prepare.state").exists()
    if finished:
        for split in splits(recipe):
            check_recipe(folder, open_rows(folder, split)[1], recipe)
    return finished


def open_state(folder, recipe):
    """Return the state of the unfinished work in a folder, or that of work that begins there.

    The state is what prepare.state holds:

    recipe    everything that determines the rows
    records   the number of records read
    skipped   a message for each record that could not be read
    source    the position in the source
    writers   by split, the number of `rows` written, and the `rest`: the ids of the row after them
    complete  there if all rows are written, and only `finish` is left to do

    Raises `UserError` if the folder holds unfinished work of another recipe, or other files.
    """
    file = folder / "prepare.state"
    if file.exists():
        kinds = {"recipe": dict, "records": int, "writers": dict, "skipped": list}
        state = read_json(file, kinds, f"move {folder} aside and start again")
        if state["records"] > 0:  # without any record, the state is made anew below
            check_recipe(folder, state["recipe"], recipe)
            note(f"{folder}: resuming after {state['records']:,} documents")
            return state | {"recipe": recipe}  # its names of tokenizer and sources may be new
    else:
        names = ("train.bin", "val.bin", "val.json", *WORK_FILES)
        foreign = [name for name in names if (folder / name).exists()]
        if foreign:
            raise UserError(f"{folder}: contains {foreign}, not of prepare.py; move it aside")
    streams = ["train", "val"] if recipe["val_share"] else ["train"]
    writers = {split: {"rows": 0, "rest": []} for split in streams}
    state = {"recipe": recipe, "records": 0, "writers": writers, "skipped": []}
    write_json(file, state)  # before any row, so that this file marks the others as ours
    return state


def remove_work(folder):
    for name in WORK_FILES:
        (folder / name).unlink(missing_ok=True)


def check_recipe(folder, old, new):
    """Raise `UserError` if recipes differ.

    The names of tokenizer and sources may differ, as long as their hashes agree.
    """

    def content(recipe):
        sources = [part | {"source": None} for part in recipe["sources"]]
        return recipe | {"tokenizer": None, "sources": sources}

    changes = []
    for key, value in content(new).items():
        if content(old).get(key) != value:
            changes.append(f"{key} was {old.get(key)!r:.200}, now {new[key]!r:.200}")
    if changes:
        raise UserError(
            f"{folder}: holds data of another recipe: {'; '.join(changes)}. Set another data_dir, "
            "or move that folder aside"
        )


def commit(folder, state):
    """Flush the rows, then write the state that counts them."""
    for split in state["writers"]:
        file = folder / f"{split}.bin.tmp"
        with writing(file):
            flush(file)
    write_json(folder / "prepare.state", state)


def finish(folder, state, source):
    """Give the files their final names and write their manifests. Safe to repeat after a kill."""
    recipe = state["recipe"]
    n_rows = {split: writer["rows"] for split, writer in state["writers"].items()}
    held = held_out_rows(recipe, n_rows["train"])
    if recipe["val_rows"]:
        n_rows["train"] -= len(held)
        n_rows["val"] = len(held)
    for split, n in n_rows.items():
        if not n:
            remove_work(folder)  # else the same command would resume, and end here again
            raise UserError(
                f"source={source}: {state['records']:,} records leave no row for {split}, of "
                f"{sum(n_rows.values()):,} in all; --val_share=0 --val_rows=N holds out N "
                "rows, such as a tenth, and a smaller --seq_len makes more rows"
            )
    for split in state["writers"]:
        work = folder / f"{split}.bin.tmp"
        if work.exists():
            shorten(folder, state, split)
            if recipe["val_rows"]:
                divide_rows(folder, recipe, held)
            else:
                os.replace(work, folder / f"{split}.bin")
    for split in n_rows:  # train first
        file = folder / f"{split}.bin"
        if split == "train":
            facts, counts, n_eos = measure(file, recipe)
        else:
            facts = measure(file, recipe)[0] | measure_unigram(file, recipe, counts)
            if recipe["val_rows"] and recipe["train_rows"] is None:
                # the number of documents that end in the training rows before each held-out row,
                # which tells whether two of these rows are of one document
                n_ended = np.cumsum(np.insert(n_eos, 0, 0))
                facts["ended_in_train"] = n_ended[held - np.arange(len(held))].tolist()
        manifest = {"split": split, **recipe, "skipped": state["skipped"], **facts}
        write_json(folder / f"{split}.json", manifest)
        print(summary(folder, manifest))
    remove_work(folder)


def held_out_rows(recipe, n_rows) -> np.ndarray:
    """Return which rows of the text to hold out for `val_rows`, in rising order.

    With `train_rows`, they are the ones after the training rows. Without it, they are spread evenly
    over the text, so that they come from as many of its documents as they can.
    """
    n = min(recipe["val_rows"], n_rows)
    if recipe["train_rows"] is not None:
        return np.arange(n_rows - n, n_rows)
    return np.arange(1, 2 * n, 2) * n_rows // max(2 * n, 1)


def divide_rows(folder, recipe, held):
    """Write the rows of train.bin.tmp to train.bin, and the `held` ones to val.bin."""
    rows = np.memmap(folder / "train.bin.tmp", np.uint32, "r").reshape(-1, recipe["row_len"])
    kept = np.delete(np.arange(len(rows)), held)
    for split, index in (("train", kept), ("val", held)):
        file = folder / f"{split}.bin"
        new = working_name(file)
        with writing(file):
            with open(new, "wb") as stored:
                for part in np.array_split(index, len(index) // 4096 + 1):
                    stored.write(rows[part])
            flush(new)
            os.replace(new, file)


def splits(recipe):
    return ["train", "val"] if recipe["val_rows"] or recipe["val_share"] else ["train"]


def measure(file, recipe):
    """Return counts and hashes of a rows file, the number of targets by id, and of EOS by row.

    Padding counts as id V of [V + 1].
    """
    row_len = recipe["row_len"]
    n_vocab = recipe["vocab_size"]
    counts = np.zeros(n_vocab + 1, np.int64)
    n_eos = []
    digest = hashlib.sha256()
    with open(file, "rb") as blocks:  # pages of np.memmap would count as the process's memory
        while block := blocks.read(4096 * row_len * 4):
            digest.update(block)
            ids = np.frombuffer(block, np.uint32).reshape(-1, row_len)
            n_eos.append((ids == recipe["eos_id"]).sum(1))
            targets = np.minimum(ids[:, 1:], n_vocab)  # PAD, above all ids, becomes V
            counts += np.bincount(targets.ravel(), minlength=len(counts))
    n_eos = np.concatenate(n_eos)
    n_rows = len(n_eos)
    n_targets = int(counts[:n_vocab].sum())
    if not n_targets:
        what = "no row has two tokens, so there is nothing to predict"
        raise UserError(f"{file}: {what}; remove {file.parent}, and prepare more text")
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
    n_vocab = recipe["vocab_size"]
    counts = counts + 1
    nats = math.log(counts[:n_vocab].sum()) - np.log(counts)
    nats[n_vocab] = 0  # of padding
    rows = np.fromfile(file, np.uint32).reshape(-1, recipe["row_len"])
    targets = np.minimum(rows[:, 1:], n_vocab)
    ce = nats[targets].sum(1)  # [rows], of all targets of a row
    n = (targets < n_vocab).sum(1)  # [rows], the number of targets
    facts = {"unigram_ce": ce.sum() / n.sum(), "unigram_half": half_interval(ce, n)}
    return for_json(facts)  # without an interval if there are few rows


# --- Finished rows


def verify(folder):
    """Hash and count everything again. Raises `UserError` at the first difference."""
    if (folder / "prepare.state").exists():
        raise UserError(f"{folder}: not finished; the command that began it resumes it")
    for split in splits(open_rows(folder, "train")[1]):
        file = folder / f"{split}.bin"
        manifest = open_rows(folder, split)[1]
        for key, value in measure(file, manifest)[0].items():
            if value != manifest.get(key):
                raise UserError(f"{file}: {key} is {value}, expected {manifest.get(key)}")
        print(f"{summary(folder, manifest)}: as the manifest says, sha256 {manifest['sha256']}")


def show(folder, first):
    """Print five training rows as text, each with its length."""
    rows, manifest = open_rows(folder, "train")
    if first >= len(rows):
        raise UserError(f"--show {first}: expected a row from 0 to {len(rows) - 1}")
    tokenizer = load_tokenizer(manifest["tokenizer"])
    for i, row in enumerate(rows[first : first + 5], first):
        ids = row[row != PAD].tolist()
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        print(f"⟦row {i}: {len(ids)} ids⟧{text}\n")


def summary(folder, manifest):
    facts = (
        "{rows:,} rows, {tokens:,} tokens, {documents:,} ends of documents, "
        "padding {padding_share:.1%}"
    )
    if "unigram_ce" in manifest:
        facts += ", unigram CE {unigram_ce:.4f}"
        if manifest["unigram_half"] is not None:
            facts += " ± {unigram_half:.4f} (95 % over rows)"
    return f"{folder / manifest['split']}.bin: {facts.format(**manifest)}"


if __name__ == "__main__":
    configure.run(main)
