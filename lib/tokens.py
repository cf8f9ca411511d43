"""The bytes that a tokenizer's ids stand for."""

import json
import re
import unicodedata
from collections import Counter

import tokenizers

from lib.errors import UserError, require

SAMPLE = "  The naïve café, Straße:\n\n\tif x  != 3:\r\n    你好。世界 नमस्ते 🙂 ½ \n"


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


def check_tokenizer(tokenizer, known: tokenizers.Tokenizer) -> None:
    """Raise `UserError` for a tokenizer that draws its ids, strips blanks, or has an EOS that is not in its file, `known`."""
    backend, eos = tokenizer.backend_tokenizer, tokenizer.eos_token
    dropout, added = getattr(backend.model, "dropout", None), backend.get_added_tokens_decoder().values()
    strip = [token.content for token in added if not token.special and (token.lstrip or token.rstrip)]
    strip = [token for token in strip if not re.fullmatch(r"<.+>|\[.+\]", token)]  # rarely in a text
    require(not dropout, f"tokenizer: dropout={dropout} draws other ids each time; set it to null in tokenizer.json")
    require(not strip, f"tokenizer: loses the blanks around {strip}; remove lstrip and rstrip in tokenizer.json")
    require(known.token_to_id(eos) is not None, f"tokenizer: lacks its eos_token {eos!r}; take another tokenizer")


def check_round_trip(tokenizer: tokenizers.Tokenizer, text: str) -> None:
    """Raise `UserError` if ids lose characters of a text. Case, Unicode's compatible forms and invisible ones do not count."""
    back = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
    before, after = (unicodedata.normalize("NFKC", some).casefold() for some in (text, back))
    lost = [c for c in Counter(before) - Counter(after) if c.isprintable() or c in "\n\t"]
    require(not lost, f"tokenizer: loses {''.join(lost)!r} of {text!r:.80}; take one with all bytes in its vocabulary")
