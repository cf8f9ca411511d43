"""The bytes that a tokenizer's ids stand for, and the ids of texts, which keep every character."""

import json
import re
import unicodedata
from collections import Counter

import tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lib.errors import UserError


def token_bytes(backend: tokenizers.Tokenizer) -> list[bytes]:
    """Return the bytes of every id; empty for special tokens.

    Reads byte-level vocabularies, and those that write U+2581 for a space.
    """
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
    kinds = {part["type"] for part in decoder.get("decoders", [decoder]) if part}
    byte_level = "ByteLevel" in kinds
    if not byte_level and not kinds & {"Metaspace", "ByteFallback"}:
        raise UserError(
            f"tokenizer: decoder {sorted(kinds)}: expected a byte-level one, or one with byte "
            "fallback"
        )
    # byte-level vocabularies write printable bytes as themselves, others from U+0100 on
    byte_of = {ord(written): chr(byte) for byte, written in bytes_to_unicode().items()}
    vocab = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    pieces = [b""] * (max(vocab.values()) + 1)
    for token, i in vocab.items():
        if i in added:
            if not added[i].special:
                pieces[i] = token.encode()
        elif byte_level:
            pieces[i] = token.translate(byte_of).encode("latin-1")
        elif byte := re.fullmatch("<0x([0-9A-F]{2})>", token):
            pieces[i] = bytes.fromhex(byte[1])
        else:
            pieces[i] = token.replace("▁", " ").encode()
    return pieces


def leading_bos(tokenizer) -> int | None:
    """Return the id that the tokenizer itself puts before a text (its BOS), or None.

    Ignores what it puts after a text. Raises `UserError` for a tokenizer that puts several ids
    before a text, or the id of no special token.
    """
    backend = tokenizer.backend_tokenizer
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    if full[: len(bare)] == bare:
        return None
    token = tokenizer.added_tokens_decoder.get(full[0])
    if full[1 : 1 + len(bare)] == bare and token and token.special:
        return full[0]
    raise UserError(
        f"tokenizer: 'a' is {bare}, but becomes {full}; expected at most one special token before "
        "it: set bos=none, or take another tokenizer"
    )


def encode_texts(backend: tokenizers.Tokenizer, texts: list[str]) -> list[tuple[list[int], str]]:
    """Return the ids of each text, and how they differ from it; "" if they spell the same text.

    Differences in case, in Unicode's compatible forms, in control characters and in added spaces
    count as none.
    """
    encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
    ids = [encoding.ids for encoding in encodings]
    decoded = backend.decode_batch(ids, skip_special_tokens=False)
    return list(zip(ids, map(difference, texts, decoded), strict=True))


def difference(text, result) -> str:
    """Return what decoded ids lose of a text or add to it; "" if nothing."""
    if text == result:
        return ""
    expected = Counter(comparable(text))
    found = Counter(comparable(result))
    lost = printed(expected - found)
    added = printed(found - expected).replace(" ", "")
    if lost or added:
        change = f"loses {lost!r} of" if lost else f"adds {added!r} to"
        return f"tokenizer: {change} {text!r:.80}; take one that keeps every character"
    return ""


def printed(characters) -> str:
    return "".join(c for c in characters if c.isprintable() or c in "\n\t")


def comparable(text) -> str:
    text = text.replace("▁", " ")  # many tokenizers write a space so
    return unicodedata.normalize("NFKC", text).casefold()
