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
    """All rows of a whole stream: a list of (ids, kind)."""
    rows, start = [], 0
    while start < len(stream):
        window = stream[start : start + row_len]
        if start + row_len >= len(stream):
            rows.append((window, "eos"))
            return rows
        for size in range(len(window), 1, -1):
            kind = kind_of_end(window[:size], stream[start + size], tokenizer)
            if kind:
                break
        else:
            size, kind = len(window), "none"
        rows.append((window[:size], kind))
        start += size
    return rows


def kind_of_end(row, following, tokenizer):
    """What a row that is cut here ends at: "eos", "line", "sentence", or None where it may not be cut."""
    if row[-1] == tokenizer.eos_token_id:
        return "eos"
    if re.search(r"\n[ \t]*\Z", plain_text([row[-1]], tokenizer)):
        return "line"
    if following == tokenizer.eos_token_id:
        return None
    text = plain_text(row, tokenizer)
    after = plain_text([following], tokenizer)[:1]
    found = SENTENCE.search(text)
    if not found or not after:
        return None
    word, stops = found["word"], found["stops"]
    wide = stops[-1] in "。！？｡"
    if not after.isspace() and not (wide and not NOT_FIRST.match(after)):
        return None
    if stops == "." and (
        word.lower() in SHORT_FORMS
        or re.fullmatch(r"[^\W_]|\d{2,3}", word)
        or (word and all(letter.isalpha() for letter in word[::2]) and set(word[1::2]) == {"."} and len(word) % 2)
    ):
        return None
    return "sentence"


def plain_text(ids, tokenizer):
    """Text of the ids, U+FFFD for parts of characters."""
    tokens = tokenizer.convert_ids_to_tokens(ids)
    if tokenizer.convert_tokens_to_ids("<0x0A>") in (None, tokenizer.unk_token_id):
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    pieces = [b"\x01" if t == tokenizer.eos_token else bytes.fromhex(t[3:5]) if t[:3] == "<0x" else t.replace("▁", " ").encode()
              for t in tokens]  # fmt: skip
    return b"".join(pieces).decode(errors="replace")
