"""The boundary rule of prepare.py, token by token from decoded text. Slow, and it shares no code with prepare.py."""

import re

SENTENCE = re.compile(
    r"""(?P<word>(?:[^\W_]|\.)*?)    # letters, digits and full stops
        (?P<stops>[.!?…‼⁇⁈⁉؟۔।。！？｡]+)
        ["'”’»›)\]}」』】》〉〕）］｝]*\Z""",
    re.VERBOSE,
)
NOT_FIRST = re.compile(r"""[.!?…‼⁇⁈⁉؟۔।。！？｡"'”’»›)\]}」』】》〉〕）］｝\ufffd]""")
TITLES = {"mr", "mrs", "ms", "mx", "dr", "prof", "rev", "fr", "hon", "gen", "col", "capt", "cmdr", "lt", "maj", "sgt", "gov", "sen",
          "rep", "pres", "st", "sr", "jr", "esq", "messrs", "mme", "mlle"}  # fmt: skip
LATIN = {"vs", "viz", "etc", "al", "ca", "cf", "approx", "resp", "incl", "excl", "ibid"}
PLACES = {"ave", "blvd", "rd", "mt", "ft", "inc", "ltd", "co", "corp", "dept", "univ", "assn", "bros", "ph.d"}
BOOKS = {"no", "nos", "vol", "vols", "ch", "chap", "sec", "fig", "figs", "eq", "eqs", "pp", "ed", "eds"}
DATES = {"jan", "feb", "mar", "apr", "jun", "jul", "aug", "sep", "sept", "oct", "nov", "dec",
         "mon", "tue", "tues", "wed", "thu", "thurs", "fri", "sat"}  # fmt: skip
SHORT_FORMS = TITLES | LATIN | PLACES | BOOKS | DATES


def naive_rows(stream, tokenizer, row_len):
    """All rows of a whole stream, as lists of ids."""
    rows, start = [], 0
    while start < len(stream):
        window = stream[start : start + row_len]
        if start + row_len >= len(stream):
            return [*rows, window]
        sizes = range(len(window), 1, -1)  # the latest place wins; without any the row is full
        size = next((n for n in sizes if may_end(window[:n], stream[start + n], tokenizer)), row_len)
        rows.append(window[:size])
        start += size
    return rows


def may_end(row, following, tokenizer):
    """Whether a row may be cut here, before the id `following`."""
    if row[-1] == tokenizer.eos_token_id or re.search(r"\n[ \t]*\Z", plain_text([row[-1]], tokenizer)):
        return True
    if following == tokenizer.eos_token_id:
        return False
    text = plain_text(row, tokenizer)
    after = plain_text([following], tokenizer)[:1]
    match = SENTENCE.search(text)
    if not match or not after:
        return False
    word, stops = match["word"], match["stops"]
    if not after.isspace() and (stops[-1] not in "。！？｡" or NOT_FIRST.match(after)):
        return False
    return stops != "." or not (
        word.lower() in SHORT_FORMS
        or re.fullmatch(r"[^\W_]|\d{2,3}", word)
        or (word and all(letter.isalpha() for letter in word[::2]) and set(word[1::2]) == {"."} and len(word) % 2)
    )


def plain_text(ids, tokenizer):
    """Text of the ids, U+FFFD for parts of characters."""
    if tokenizer.convert_tokens_to_ids("<0x0A>") in (None, tokenizer.unk_token_id):
        return tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
    pieces = [b"\x01" if t == tokenizer.eos_token else bytes.fromhex(t[3:5]) if t[:3] == "<0x" else t.replace("▁", " ").encode()
              for t in tokenizer.convert_ids_to_tokens(ids)]  # fmt: skip
    return b"".join(pieces).decode(errors="replace")
