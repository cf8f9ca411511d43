"""Every objective again, typed from its paper's equations: one position, one token, one pair at a
time, in fp64.

Slow on purpose, and sharing nothing with losses.py. Probabilities are probabilities here, and a
region's mass is a sum of them. Each objective takes z_s, z_t [N, V] fp64 and y [N] and returns [N];
autograd gives the gradient. No setting has a default here.
"""

import math
import re

import torch

IGNORE = -100


def softmax(z, tau=1.0):
    top = max(x.item() for x in z)
    e = [torch.exp((x - top) / tau) for x in z]
    total = sum(e)
    return [x / total for x in e]


def kl(p, q):
    return sum(a * (torch.log(a) - torch.log(b)) for a, b in zip(p, q, strict=True))


def pair_kl(p, q):
    """KL of the two-way distributions (p, 1 - p) and (q, 1 - q)."""
    return kl([p, 1 - p], [q, 1 - q])


def pick(x, region):
    return [x[i] for i in region]


def mass(p, region):
    return sum(p[i] for i in region)


def conditional(p, region):
    total = mass(p, region)
    return [p[i] / total for i in region]


def conditional_kl(p, q, region):
    """KL of the probabilities within a region."""
    return kl(conditional(p, region), conditional(q, region))


def softmax_kl(t, s, region, tau):
    """KL of the softmaxes over a region's logits."""
    return kl(softmax(pick(t, region), tau), softmax(pick(s, region), tau))


def mixture(weight, p, q):
    return [weight * a + (1 - weight) * b for a, b in zip(p, q, strict=True)]


def top(z, d):
    """Indices of the d largest, the lower index first where equal."""
    return sorted(range(len(z)), key=lambda i: (-z[i].item(), i))[:d]


def others(region, z):
    return [i for i in range(len(z)) if i not in region]


def lower_median(values):
    return sorted(values)[(len(values) - 1) // 2]


def rows(z_s, z_t, y):
    """The valid positions, {u: (student's logits, teacher's logits, label)}."""
    z_t = z_t.detach()
    valid = [u for u in range(len(y)) if int(y[u]) != IGNORE]
    return {u: (list(z_s[u]), list(z_t[u]), int(y[u])) for u in valid}


def gather(z_s, losses):
    """{u: loss} -> [N], 0 where there is none."""
    zero = torch.zeros((), dtype=z_s.dtype)
    return torch.stack([losses.get(u, zero) for u in range(len(z_s))])


def per_position(f):
    """An objective from f(s, t, label, ..), the loss of one position."""

    def objective(z_s, z_t, y, **settings):
        losses = {}
        for u, (s, t, label) in rows(z_s, z_t, y).items():
            losses[u] = f(s, t, label, **settings)
        return gather(z_s, losses)

    return objective


def of_probabilities(f):
    """An objective from f(p_s, p_t, ..), the loss of two softmaxes; without a tau, at 1."""

    @per_position
    def objective(s, t, label, tau=1.0, **settings):
        return f(softmax(s, tau), softmax(t, tau), **settings)

    return objective


@per_position
def cross_entropy(s, t, label):
    return -torch.log(softmax(s)[label])


def standardized(z):
    mean = sum(z) / len(z)
    std = torch.sqrt(sum((x - mean) ** 2 for x in z) / (len(z) - 1))
    return [(x - mean) / (std + 1e-7) for x in z]


@per_position
def vanilla_kd(s, t, label, tau, t2_scaling, standardize):
    if standardize:
        s = standardized(s)
        t = standardized(t)
    loss = kl(softmax(t, tau), softmax(s, tau))
    return tau**2 * loss if t2_scaling else loss


@per_position
def pd(s, t, label, tau, top_p, top_k, truncate_on, temper_student):
    p = softmax(t, tau if truncate_on == "tempered" else 1.0)
    kept = []
    total = 0.0
    for i in top(t, len(t)):
        kept.append(i)
        total += p[i].item()
        if total >= top_p:
            break
    kept = kept[:top_k]
    f = softmax(pick(t, kept), tau)
    p_s = softmax(s, tau if temper_student else 1.0)
    return kl(f, pick(p_s, kept))


def atkd(z_s, z_t, y, tau, easy_weight):
    unc = {}
    tkd = {}
    dkd = {}
    for u, (s, t, label) in rows(z_s, z_t, y).items():
        p_s = softmax(s, tau)
        p_t = softmax(t, tau)
        unc[u] = (1 - p_t[label]).item()
        tkd[u] = pair_kl(p_t[label], p_s[label])
        dkd[u] = conditional_kl(p_t, p_s, others([label], t))
    threshold = lower_median(list(unc.values()))
    easy = [u for u in unc if unc[u] < threshold]
    hard = [u for u in unc if unc[u] >= threshold]
    losses = {}
    for u in easy:
        losses[u] = easy_weight * len(unc) / len(easy) * dkd[u]
    for u in hard:
        losses[u] = (1 - easy_weight) * len(unc) / len(hard) * (tkd[u] + dkd[u])
    return gather(z_s, losses)


@per_position
def rld(s, t, label, tau, tau_conf, alpha, beta):
    p_s = softmax(s, tau_conf)
    p_t = softmax(t, tau_conf)
    scd = pair_kl(max(p_t), p_s[label])
    below = [i for i in range(len(t)) if t[i] < t[label]]
    mcd = softmax_kl(t, s, below, tau) if below else 0.0
    return alpha * tau_conf**2 * scd + beta * tau**2 * mcd


@per_position
def ldrld(s, t, label, tau, d, alpha, beta, pair_reduction):
    local = top(s, d)
    total = 0.0
    n = 0
    for r in range(1, d + 1):
        for q in range(r + 1, d + 1):
            adw = 2.0 / (1.5 + (q - r)) * math.exp(-0.05 * (r + q))
            pair = [local[r - 1], local[q - 1]]
            total = total + adw * softmax_kl(t, s, pair, tau)
            n += 1
    llki = softmax_kl(t, s, local, tau)
    total = total + (adw * llki if d == 2 else llki)
    if pair_reduction == "mean":
        total = total / (n + 1)
    rest = softmax_kl(t, s, others(local, s), tau)
    return tau**2 * (alpha * total + beta * rest)


def tad(z_s, z_t, y, tau, top_k, beta, norm):
    d1 = {}
    d2 = {}
    alpha = {}
    for u, (s, t, _) in rows(z_s, z_t, y).items():
        p_s = softmax(s, tau)
        p_t = softmax(t, tau)
        head = top(t, top_k)
        tail = others(head, t)
        alpha[u] = mass(p_t, tail)
        categories_t = [*pick(p_t, head), alpha[u]]
        categories_s = [*pick(p_s, head), mass(p_s, tail)]
        d1[u] = kl(categories_t, categories_s)
        d2[u] = conditional_kl(p_t, p_s, tail)
    mean = sum(alpha.values()) / len(alpha)
    losses = {}
    for u in alpha:
        weight = {"sequence": alpha[u] / mean, "unit": 1.0, "none": alpha[u]}[norm]
        losses[u] = d1[u] + beta * weight * d2[u]
    return gather(z_s, losses)


@per_position
def bild(s, t, label, tau, top_k):
    loss = 0.0
    for leader in (t, s):
        j = top(leader, top_k)
        d_t = []
        d_s = []
        for a in range(top_k):
            for b in range(a + 1, top_k):
                d_t.append(t[j[a]] - t[j[b]])
                d_s.append(s[j[a]] - s[j[b]])
        loss = loss + kl(softmax(d_t, tau), softmax(d_s, tau))
    return loss


def candidates(s, t, label, d_max, anchor):
    """Eq. 4 and 5: the proposals, with each missing anchor in place of the lowest-ranked one that
    is no anchor."""
    proposal = top(s, d_max)
    top_1 = top(t, 1)
    anchors = {"none": [], "teacher": top_1, "label": [label], "both": [*top_1, label]}[anchor]
    for a in anchors:
        if a not in proposal:
            victim = [i for i in proposal if i not in anchors][-1]
            proposal.remove(victim)
            proposal.append(a)
    return proposal


def alra_terms(
    z_s,
    z_t,
    y,
    d_min,
    d_max,
    tau,
    tau_p,
    gamma,
    eps,
    anchor,
    pair,
    budget,
    detach_weights,
    **_,
):
    """{u: the pieces of that position}, following Algorithm 1."""
    chosen = {}
    support = {}
    for u, (s, t, label) in rows(z_s, z_t, y).items():
        if budget == "fixed":
            chosen[u] = top(s, d_max)
        else:
            chosen[u] = candidates(s, t, label, d_max, anchor)
        rho = conditional(softmax(t, tau), chosen[u])
        support[u] = math.exp(-sum(r.item() * math.log(r.item()) for r in rho))  # Eq. 6
    mean = sum(support.values()) / len(support)  # Eq. 7
    pieces = {}
    for u, (s, t, _) in rows(z_s, z_t, y).items():
        p_s = softmax(s, tau)
        p_t = softmax(t, tau)
        d_u = d_max
        if budget == "adaptive":
            d_u = round(d_min + (d_max - d_min) * support[u] / (mean + eps))  # Eq. 8
            d_u = min(max(d_u, d_min), d_max)
        local = sorted(chosen[u], key=lambda i: (-t[i].item(), i))[:d_u]  # Eq. 9
        alpha_s = mass(p_s, local)  # Eq. 10
        alpha_t = mass(p_t, local)
        pairs = [(i, j) for n, i in enumerate(local) for j in local[n + 1 :]]  # Eq. 15
        p_w = [p.detach() for p in p_s] if detach_weights else p_s
        score = {}
        for i, j in pairs:  # Eq. 19
            closeness = torch.exp(-gamma * abs(p_w[i] - p_w[j]))
            score[i, j] = closeness * (p_w[i] + p_w[j])
        total = sum(score.values())
        aligned = 0.0
        for i, j in pairs:
            kappa = 1.0  # PRA, Eq. 18
            if pair == "pra_u":
                kappa = 1 / len(pairs)
            elif pair == "swpra":
                kappa = score[i, j] / (total + eps)  # Eq. 20
            aligned = aligned + kappa * softmax_kl(t, s, [i, j], tau_p)  # Eq. 16, 17
        pieces[u] = {
            "mass": pair_kl(alpha_t, alpha_s),  # Eq. 14
            "local": conditional_kl(p_t, p_s, local),
            "rest": conditional_kl(p_t, p_s, others(local, t)),
            "pair": aligned,
            "d_u": d_u,
            "support": support[u],
            "tokens": chosen[u],
            "set": local,
            "alpha_t": alpha_t,
        }
    return pieces


def alra(z_s, z_t, y, lambda_pair, w_mass, w_local, w_rest, coefficients, **settings):
    losses = {}
    for u, t in alra_terms(z_s, z_t, y, **settings).items():
        local = w_local * t["local"]
        rest = w_rest * t["rest"]
        if coefficients == "exact":  # Eq. 13
            local = t["alpha_t"] * local
            rest = (1 - t["alpha_t"]) * rest
        losses[u] = w_mass * t["mass"] + local + rest + lambda_pair * t["pair"]
    return gather(z_s, losses)


@of_probabilities
def reverse_kl(p_s, p_t):
    return kl(p_s, p_t)


@of_probabilities
def jsd(p_s, p_t, beta):
    m = mixture(beta, p_t, p_s)
    return beta * kl(p_t, m) + (1 - beta) * kl(p_s, m)


@of_probabilities
def tvd(p_s, p_t):
    return 0.5 * sum(abs(a - b) for a, b in zip(p_s, p_t, strict=True))


@per_position
def dkd(s, t, label, tau, alpha, beta):
    p_s = softmax(s, tau)
    p_t = softmax(t, tau)
    tckd = pair_kl(p_t[label], p_s[label])
    nckd = conditional_kl(p_t, p_s, others([label], t))
    return tau**2 * (alpha * tckd + beta * nckd)


@per_position
def mse_logits(s, t, label):
    return sum((a - b) ** 2 for a, b in zip(s, t, strict=True)) / len(t)


def adakd(z_s, z_t, y, keep, c, rule, base):
    valid = rows(z_s, z_t, y)
    difficulty = {}
    for u, (s, t, _) in valid.items():
        p_s = softmax(s)
        p_t = softmax(t)
        if rule == "hellinger":
            roots = [(torch.sqrt(a) - torch.sqrt(b)) ** 2 for a, b in zip(p_s, p_t, strict=True)]
            difficulty[u] = torch.sqrt(sum(roots)) / math.sqrt(2)
        else:
            difficulty[u] = kl(p_s, p_t)
    hardest = sorted(valid, key=lambda u: -difficulty[u].item())
    hardest = hardest[: max(1, math.floor(keep * len(valid)))]
    median = lower_median(pick(difficulty, hardest))
    losses = {}
    for u in hardest:
        s, t, _ = valid[u]
        tau = torch.exp(-c * torch.tanh(torch.log(difficulty[u] / median)))
        a = softmax(s, tau)
        b = softmax(t, tau)
        loss = kl(a, b) if base == "reverse" else kl(b, a)
        losses[u] = len(valid) / len(hardest) * tau**2 * loss
    return gather(z_s, losses)


def sekd(z_s, z_t, y, tau, keep):
    valid = rows(z_s, z_t, y)
    if len(valid) < 3 and keep < 1:
        return gather(z_s, {})
    certainty = {}
    for u, (s, _, _) in valid.items():
        certainty[u] = sum(p.item() * math.log(p.item()) for p in softmax(s))
    n_kept = math.ceil(keep * len(valid))
    kept = sorted(valid, key=certainty.get)[:n_kept]
    losses = {}
    for u in kept:
        s, t, _ = valid[u]
        losses[u] = len(valid) / len(kept) * tau**2 * kl(softmax(t, tau), softmax(s, tau))
    return gather(z_s, losses)


@of_probabilities
def bdl(p_s, p_t, lam):
    return kl(mixture(lam, p_s, p_t), mixture(lam, p_t, p_s))


@of_probabilities
def skew_fkl(p_s, p_t, lam):
    return kl(p_t, mixture(lam, p_t, p_s))


@of_probabilities
def skew_rkl(p_s, p_t, lam):
    return kl(p_s, mixture(lam, p_s, p_t))


@of_probabilities
def abkd(p_s, p_t, alpha, beta):
    """Its limits, where alpha, beta or their sum is 0, are among the recorded numbers."""
    c = alpha + beta
    loss = 0.0
    for p, q in zip(p_t, p_s, strict=True):
        loss = loss + alpha / c * p**c + beta / c * q**c - p**alpha * q**beta
    return loss / (alpha * beta)


@per_position
def akl(s, t, label, mu):
    q = softmax(s)
    p = softmax(t)
    error = [abs(a - b).item() for a, b in zip(p, q, strict=True)]
    head = []
    for i in range(len(t)):
        up_to = sum(p[j].item() for j in range(len(t)) if t[j] >= t[i])
        if up_to <= mu or t[i] == max(t):
            head.append(i)
    h = mass(error, head) / sum(error)
    return h * kl(p, q) + (1 - h) * kl(q, p)


@of_probabilities
def todi(p_s, p_t):
    loss = 0.0
    for q, p in zip(p_s, p_t, strict=True):
        w = (p / (p + q)).item()
        forward = p * torch.log(p / q)
        reverse = q * torch.log(q / p)
        loss = loss + w * forward + (1 - w) * reverse
    return loss


@per_position
def taid(s, z, label, t):
    between = mixture(t, z, [x.detach() for x in s])
    return kl(softmax(between), softmax(s))


@per_position
def rs_kd(s, z, label, draws):
    tokens = next(draws).tolist()
    return -sum(torch.log(softmax(s)[token]) for token in tokens) / len(tokens)


# --- the boundary rule of prepare.py, token by token from decoded text, without its code

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
            after = stream[start + size : start + size + 3]
            if may_end(stream[start : start + size], after, tokenizer):
                break
        else:
            size = row_len
        rows.append(stream[start : start + size])
        start += size
    if start < len(stream):
        rows.append(stream[start:])
    return rows


def may_end(row, following, tokenizer):
    """Whether a row may be cut here, before the ids `following`, of which three spell a space."""
    if row[-1] == tokenizer.eos_token_id or re.search(
        r"\n[ \t]*\Z", plain_text([row[-1]], tokenizer)
    ):
        return True
    if following[0] == tokenizer.eos_token_id:
        return False
    text = plain_text(row, tokenizer)
    after = plain_text(following, tokenizer)[:1]
    if after != " ":
        after = plain_text(following[:1], tokenizer)[:1]
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
