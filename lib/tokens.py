"""The bytes that a tokenizer's ids stand for."""

import json
import re

import tokenizers

from lib.files import UserError


def token_bytes(backend: tokenizers.Tokenizer) -> list[bytes]:
    """The bytes of every id; empty for special tokens. For byte-level vocabularies and those with U+2581 for a space."""
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
    kinds = {part["type"] for part in decoder.get("decoders", [decoder]) if part}
    byte_level = "ByteLevel" in kinds
    if not byte_level and not kinds & {"Metaspace", "ByteFallback"}:
        raise ValueError(f"tokenizer: decoder {sorted(kinds)}: expected a byte-level one, or one with byte fallback")
    shown = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    hidden = [b for b in range(256) if b not in shown]  # written as the characters from U+0100 on
    latin = {b: chr(b) for b in shown} | {256 + i: chr(b) for i, b in enumerate(hidden)}
    vocab, added = backend.get_vocab(with_added_tokens=True), backend.get_added_tokens_decoder()
    pieces = [b""] * (max(vocab.values()) + 1)
    for token, i in vocab.items():
        if i in added:
            pieces[i] = b"" if added[i].special else token.encode()
        elif byte_level:
            pieces[i] = token.translate(latin).encode("latin-1")
        elif byte := re.fullmatch("<0x([0-9A-F]{2})>", token):
            pieces[i] = bytes([int(byte[1], 16)])
        else:
            pieces[i] = token.replace("▁", " ").encode()
    return pieces


def leading_bos(tokenizer) -> int | None:
    """The id that the tokenizer itself puts before a text (its BOS), or None. What it puts after a text is ignored.

    Raises `UserError` for a tokenizer that puts several ids before a text, or one that is not a special token.
    """
    backend = tokenizer.backend_tokenizer
    bare, whole = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
    n_before = next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), None)
    added, special = whole[:n_before], [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    if not added:
        return None
    if len(added) > 1 or n_before is None or added[0] not in special:
        raise UserError(
            f"tokenizer: turns 'a', {bare}, into {whole} by itself; expected at most one special token before it: set "
            "bos=none, or take another tokenizer"
        )
    return added[0]
