"""The bytes that a tokenizer's ids stand for, and checks of what it does to texts."""

import re
import unicodedata
from collections import Counter
from pathlib import Path

from transformers.convert_slow_tokenizer import bytes_to_unicode

from lib.errors import UserError
from lib.hf import config_of


def token_bytes(tokenizer) -> list[bytes]:
    """Return the bytes of text that every id stands for.

    They are empty for EOS, BOS and what else the tokenizer puts around a text, but not for other
    special tokens: their ids only come from texts that a vocabulary spells so. Reads byte-level
    vocabularies, and those that write U+2581 for a space.
    """
    backend = tokenizer.backend_tokenizer
    decoder = repr(backend.decoder)  # with the names of its parts
    byte_level = "ByteLevel" in decoder
    if not re.search("ByteLevel|Metaspace|ByteFallback", decoder):
        raise UserError(
            f"tokenizer: decoder {decoder}: expected a byte-level one, or one with byte fallback"
        )
    # byte-level vocabularies write printable bytes as themselves, others from U+0100 on
    byte_of = {ord(written): chr(byte) for byte, written in bytes_to_unicode().items()}
    vocab = backend.get_vocab()
    added = backend.get_added_tokens_decoder()
    pieces = [b""] * (max(vocab.values()) + 1)
    for token, i in vocab.items():
        if not byte_level:
            byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
            pieces[i] = bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()
        elif i in added or not byte_of.keys() >= set(map(ord, token)):
            pieces[i] = token.encode()
        else:
            pieces[i] = token.translate(byte_of).encode("latin-1")
    around = backend.encode("").ids
    for i in {tokenizer.eos_token_id, tokenizer.bos_token_id, *around} - {None}:
        pieces[i] = b""
    return pieces


def leading_bos(tokenizer) -> int | None:
    """Return the id that the tokenizer itself puts before a text (its BOS), or None.

    Ignores what it puts after a text. Raises `UserError` for a tokenizer that puts several ids
    before a text, or the id of no special token, and if its tokenizer_config.json does not agree:
    which of the two files transformers follows depends on its version and the tokenizer's class.
    """
    bare = tokenizer.encode("a", add_special_tokens=False)
    full = tokenizer.encode("a")
    bos = None
    if full[: len(bare)] != bare:
        bos = full[0]
        token = tokenizer.added_tokens_decoder.get(bos)
        if full[1 : 1 + len(bare)] != bare or not (token and token.special):
            raise UserError(
                f"tokenizer: 'a' is {bare}, but becomes {full}; expected at most one special token "
                "before it: set bos=none, or take another tokenizer"
            )
    folder = Path(tokenizer.name_or_path)
    adds = config_of(folder).get("add_bos_token")
    if adds not in (None, bos is not None):
        raise UserError(
            f"{folder}: add_bos_token is {adds} in tokenizer_config.json, but tokenizer.json adds "
            f"{'no' if bos is None else 'a'} BOS; correct either, or set bos=none"
        )
    return bos


def loss_of(text, result) -> str:
    """Return what the text `result` of a text's ids lacks of its characters; "" if nothing.

    Case, Unicode's compatible forms and control characters do not count.
    """
    if text == result:
        return ""
    lost = Counter(comparable(text)) - Counter(comparable(result))
    characters = "".join(c for c in lost if c.isprintable() or c in "\n\t")
    if not characters:
        return ""
    return f"tokenizer: loses {characters!r} of {text!r:.80}; take one that keeps every character"


def comparable(text) -> str:
    text = text.replace("▁", " ")  # many tokenizers write a space so
    return unicodedata.normalize("NFKC", text).casefold()
