"""The boundary rule of prepare.py, token by token from decoded text: slow, and without its code."""

import re

SENTENCE = re.compile(
    r"""(?P<word>(?:[^\W_]|\.)*?)    # letters, digits and full stops
        (?P<stops>[.!?…‼⁇⁈⁉؟۔।。！？｡]+)
        ["'”’»›)\]}」』】》〉〕）］｝]*\Z""",
    re.VERBOSE,
)
NOT_FIRST = re.compile(r"""[.!?…‼⁇⁈⁉؟۔।。！？｡"'”’»›)\]}」』】》〉〕）］｝\ufffd]""")
SHORT_FORMS = set(
    re.findall(
        r"\S+",
        """mr mrs ms mx dr prof rev fr hon gen col capt cmdr lt maj sgt gov sen
        rep pres st sr jr esq messrs mme mlle
        vs viz etc al ca cf approx resp incl excl ibid
        ave blvd rd mt ft inc ltd co corp dept univ assn bros ph.d
        no nos vol vols ch chap sec fig figs eq eqs pp ed eds
        jan feb mar apr jun jul aug sep sept oct nov dec mon tue tues wed thu thurs fri sat""",
    )
)


def naive_rows(stream, tokenizer, row_len):
    """All rows of a whole stream, as lists of ids."""
    rows = []
    start = 0
    while start + row_len < len(stream):
        for size in range(row_len, 1, -1):  # the latest place wins
            if may_end(stream[start : start + size], stream[start + size], tokenizer):
                break
        else:
            size = row_len
        rows.append(stream[start : start + size])
        start += size
    if start < len(stream):
        rows.append(stream[start:])
    return rows


def may_end(row, following, tokenizer):
    """Whether a row may be cut here, before the id `following`."""
    if row[-1] == tokenizer.eos_token_id or re.search(
        r"\n[ \t]*\Z", plain_text([row[-1]], tokenizer)
    ):
        return True
    if following == tokenizer.eos_token_id:
        return False
    text = plain_text(row, tokenizer)
    after = plain_text([following], tokenizer)[:1]
    match = SENTENCE.search(text)
    if not match or not after:
        return False
    word = match["word"]
    stops = match["stops"]
    if not after.isspace() and (stops[-1] not in "。！？｡" or NOT_FIRST.match(after)):
        return False
    if stops != ".":
        return True
    if word.lower() in SHORT_FORMS or re.fullmatch(r"[^\W_]|\d{2,3}", word):
        return False
    letters = word[::2]
    initials = len(word) % 2 and set(word[1::2]) <= {"."} and all(map(str.isalpha, letters))
    return not initials


def plain_text(ids, tokenizer):
    """Text of the ids, U+FFFD for parts of characters."""
    if tokenizer.convert_tokens_to_ids("<0x0A>") in (None, tokenizer.unk_token_id):
        return tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
    text = b""
    for token in tokenizer.convert_ids_to_tokens(ids):
        if token == tokenizer.eos_token:
            text += b"\x01"
        elif token.startswith("<0x"):
            text += bytes.fromhex(token[3:5])
        else:
            text += token.encode()
    return text.decode(errors="replace").replace("▁", " ")
