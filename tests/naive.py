"""Every objective again, typed from its paper's equations: one position, one token, one pair at a time, in fp64.

Slow on purpose, and sharing nothing with losses.py. Probabilities are probabilities here and a region's mass is a sum
of them. Each function takes z_s, z_t [N, V] fp64 and y [N] and returns [N]; autograd gives the gradient.
"""

import math

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
    """Of the two-way distributions (p, 1 - p) and (q, 1 - q)."""
    return kl([p, 1 - p], [q, 1 - q])


def conditional(p, region):
    mass = sum(p[i] for i in region)
    return [p[i] / mass for i in region]


def top(z, d):
    """Indices of the d largest, the lower index first where equal."""
    return sorted(range(len(z)), key=lambda i: (-z[i].item(), i))[:d]


def rows(z_s, z_t, y):
    """The valid positions: u, student's logits, teacher's logits, label."""
    z_t = z_t.detach()
    return [(u, list(z_s[u]), list(z_t[u]), int(y[u])) for u in range(len(y)) if int(y[u]) != IGNORE]


def gather(z_s, losses):
    """{u: loss} -> [N], 0 where there is none."""
    zero = torch.zeros((), dtype=z_s.dtype)
    return torch.stack([losses.get(u, zero) for u in range(len(z_s))])


def cross_entropy(z_s, z_t, y):
    return gather(z_s, {u: -torch.log(softmax(s)[label]) for u, s, _, label in rows(z_s, z_s, y)})


def standardized(z):
    mean = sum(z) / len(z)
    std = torch.sqrt(sum((x - mean) ** 2 for x in z) / (len(z) - 1))
    return [(x - mean) / (std + 1e-7) for x in z]


def vanilla_kd(z_s, z_t, y, tau=0.5, t2_scaling=False, standardize=False):
    scale, of = tau**2 if t2_scaling else 1.0, standardized if standardize else list
    return gather(z_s, {u: scale * kl(softmax(of(t), tau), softmax(of(s), tau)) for u, s, t, _ in rows(z_s, z_t, y)})


def pd(z_s, z_t, y, tau=0.5, top_p=0.95, top_k=50, truncate_on="tempered", temper_student=False):
    out = {}
    for u, s, t, _ in rows(z_s, z_t, y):
        p = softmax(t, tau if truncate_on == "tempered" else 1.0)
        kept, mass = [], 0.0
        for i in top(t, len(t)):
            kept.append(i)
            mass += p[i].item()
            if mass >= top_p:
                break
        kept = kept[:top_k]
        f = softmax([t[i] for i in kept], tau)
        p_s = softmax(s, tau if temper_student else 1.0)
        out[u] = kl(f, [p_s[i] for i in kept])
    return gather(z_s, out)


def without(label, z):
    return [i for i in range(len(z)) if i != label]


def lower_median(values):
    return sorted(values)[(len(values) - 1) // 2]


def atkd(z_s, z_t, y, tau=1.0, easy_weight=0.5):
    found = rows(z_s, z_t, y)
    if not found:
        return gather(z_s, {})
    unc, tkd, dkd_ = {}, {}, {}
    for u, s, t, label in found:
        p_s, p_t = softmax(s, tau), softmax(t, tau)
        unc[u] = (1 - p_t[label]).item()
        tkd[u] = pair_kl(p_t[label], p_s[label])
        dkd_[u] = kl(conditional(p_t, without(label, t)), conditional(p_s, without(label, s)))
    threshold = lower_median(list(unc.values()))
    easy = [u for u in unc if unc[u] < threshold]
    hard = [u for u in unc if unc[u] >= threshold]
    out = {u: easy_weight * len(unc) / len(easy) * dkd_[u] for u in easy}
    out |= {u: (1 - easy_weight) * len(unc) / len(hard) * (tkd[u] + dkd_[u]) for u in hard}
    return gather(z_s, out)


def rld(z_s, z_t, y, tau=1.0, tau_conf=1.0, alpha=1.0, beta=1.0):
    out = {}
    for u, s, t, label in rows(z_s, z_t, y):
        scd = pair_kl(max(softmax(t, tau_conf)), softmax(s, tau_conf)[label])
        below = [i for i in range(len(t)) if t[i] < t[label]]
        mcd = kl(softmax([t[i] for i in below], tau), softmax([s[i] for i in below], tau)) if below else 0.0
        out[u] = alpha * tau_conf**2 * scd + beta * tau**2 * mcd
    return gather(z_s, out)


def ldrld(z_s, z_t, y, tau=1.0, d=15, alpha=1.0, beta=1.0, pair_reduction="mean"):
    out = {}
    for u, s, t, _ in rows(z_s, z_t, y):
        local = top(s, d)
        rest = [i for i in range(len(s)) if i not in local]
        total, n, first = 0.0, 0, None
        for r in range(1, d + 1):
            for q in range(r + 1, d + 1):
                i, j = local[r - 1], local[q - 1]
                adw = 2.0 / (1.5 + (q - r)) * math.exp(-0.05 * (r + q))
                first = first or adw
                total = total + adw * kl(softmax([t[i], t[j]], tau), softmax([s[i], s[j]], tau))
                n += 1
        whole = kl(softmax([t[i] for i in local], tau), softmax([s[i] for i in local], tau))
        total = total + (first if d == 2 else 1.0) * whole
        total = total / (n + 1) if pair_reduction == "mean" else total
        rntk = kl(softmax([t[i] for i in rest], tau), softmax([s[i] for i in rest], tau))
        out[u] = tau**2 * (alpha * total + beta * rntk)
    return gather(z_s, out)


def tad_terms(s, t, tau, top_k):
    """-> D1, D2, the teacher's tail mass, of one position."""
    p_s, p_t = softmax(s, tau), softmax(t, tau)
    head = top(t, top_k)
    tail = [i for i in range(len(t)) if i not in head]
    tail_s, tail_t = sum(p_s[i] for i in tail), sum(p_t[i] for i in tail)
    d1 = kl([p_t[i] for i in head] + [tail_t], [p_s[i] for i in head] + [tail_s])
    return d1, kl(conditional(p_t, tail), conditional(p_s, tail)), tail_t


def tad(z_s, z_t, y, tau=1.0, top_k=10, beta=2.0, norm="sequence"):
    terms = {u: tad_terms(s, t, tau, top_k) for u, s, t, _ in rows(z_s, z_t, y)}
    mean = sum(alpha for _, _, alpha in terms.values()) / max(len(terms), 1)
    weight = {"sequence": lambda a: a / mean, "unit": lambda a: 1.0, "none": lambda a: a}[norm]
    return gather(z_s, {u: d1 + beta * weight(alpha) * d2 for u, (d1, d2, alpha) in terms.items()})


def bild(z_s, z_t, y, tau=3.0, top_k=8):
    out = {}
    for u, s, t, _ in rows(z_s, z_t, y):
        out[u] = 0.0
        for leader in (t, s):
            j = top(leader, top_k)
            pairs = [(j[a], j[b]) for a in range(top_k) for b in range(a + 1, top_k)]
            out[u] = out[u] + kl(
                softmax([t[a] - t[b] for a, b in pairs], tau), softmax([s[a] - s[b] for a, b in pairs], tau)
            )
    return gather(z_s, out)


def candidates(s, t, label, d_max, anchor):
    """Eq. 4 and 5: the proposals, with each missing anchor in place of the lowest-ranked one that is no anchor."""
    proposal = top(s, d_max)
    anchors = {"none": [], "teacher": [top(t, 1)[0]], "label": [label], "both": [top(t, 1)[0], label]}[anchor]
    for a in anchors:
        if a not in proposal:
            victim = [i for i in proposal if i not in anchors][-1]
            proposal = [i for i in proposal if i != victim] + [a]
    return proposal


def alra_terms(z_s, z_t, y, d_min=3, d_max=25, tau=1.0, tau_p=1.0, gamma=5.0, eps=1e-6, anchor="teacher",
               pair="swpra", budget="adaptive", detach_weights=True, **_):  # fmt: skip
    """{u: the pieces of that position}, following Algorithm 1."""
    found = rows(z_s, z_t, y)
    chosen, support = {}, {}
    for u, s, t, label in found:
        chosen[u] = top(s, d_max) if budget == "fixed" else candidates(s, t, label, d_max, anchor)
        p_t = softmax(t, tau)
        rho = conditional(p_t, chosen[u])
        support[u] = math.exp(-sum(r.item() * math.log(r.item()) for r in rho))  # Eq. 6
    mean = sum(support.values()) / max(len(support), 1)  # Eq. 7
    out = {}
    for u, s, t, _ in found:
        p_s, p_t = softmax(s, tau), softmax(t, tau)
        d_u = min(max(round(d_min + (d_max - d_min) * support[u] / (mean + eps)), d_min), d_max)  # Eq. 8
        d_u = d_max if budget == "fixed" else d_u
        local = sorted(chosen[u], key=lambda i: (-t[i].item(), i))[:d_u]  # Eq. 9
        rest = [i for i in range(len(t)) if i not in local]
        alpha_s, alpha_t = sum(p_s[i] for i in local), sum(p_t[i] for i in local)  # Eq. 10
        pairs = [(i, j) for n, i in enumerate(local) for j in local[n + 1 :]]  # Eq. 15
        r = {}
        for i, j in pairs:  # Eq. 16
            r[i, j] = kl(softmax([t[i], t[j]], tau_p), softmax([s[i], s[j]], tau_p))
        p_w = [p.detach() for p in p_s] if detach_weights else p_s
        score = {(i, j): torch.exp(-gamma * abs(p_w[i] - p_w[j])) * (p_w[i] + p_w[j]) for i, j in pairs}  # Eq. 19
        total = sum(score.values())
        if pair == "swpra":
            kappa = {ij: score[ij] / (total + eps) for ij in pairs}  # Eq. 20
        else:
            kappa = {ij: 1.0 if pair == "pra" else 1 / len(pairs) for ij in pairs}  # Eq. 18
        out[u] = {
            "mass": pair_kl(alpha_t, alpha_s),
            "local": kl(conditional(p_t, local), conditional(p_s, local)),
            "rest": kl(conditional(p_t, rest), conditional(p_s, rest)),  # Eq. 14
            "pair": sum(kappa[ij] * r[ij] for ij in pairs),  # Eq. 17
            "d_u": d_u, "support": support[u], "alpha_t": alpha_t, "tokens": chosen[u], "set": local,
        }  # fmt: skip
    return out


def alra(z_s, z_t, y, lambda_pair=1.0, **hyper):
    terms = alra_terms(z_s, z_t, y, **hyper)
    return gather(z_s, {u: t["mass"] + t["local"] + t["rest"] + lambda_pair * t["pair"] for u, t in terms.items()})


def reverse_kl(z_s, z_t, y, tau=1.0):
    return gather(z_s, {u: kl(softmax(s, tau), softmax(t, tau)) for u, s, t, _ in rows(z_s, z_t, y)})


def mixture(weight, p, q):
    return [weight * a + (1 - weight) * b for a, b in zip(p, q, strict=True)]


def jsd(z_s, z_t, y, beta=0.5, tau=1.0):
    out = {}
    for u, s, t, _ in rows(z_s, z_t, y):
        p_s, p_t = softmax(s, tau), softmax(t, tau)
        m = mixture(beta, p_t, p_s)
        out[u] = {0.0: kl(p_t, p_s), 1.0: kl(p_s, p_t)}.get(beta, beta * kl(p_t, m) + (1 - beta) * kl(p_s, m))
    return gather(z_s, out)


def tvd(z_s, z_t, y):
    return gather(z_s, {u: 0.5 * sum(abs(a - b) for a, b in zip(softmax(s), softmax(t), strict=True))
                        for u, s, t, _ in rows(z_s, z_t, y)})  # fmt: skip


def dkd(z_s, z_t, y, tau=4.0, alpha=1.0, beta=8.0):
    out = {}
    for u, s, t, label in rows(z_s, z_t, y):
        p_s, p_t = softmax(s, tau), softmax(t, tau)
        nckd = kl(conditional(p_t, without(label, t)), conditional(p_s, without(label, s)))
        out[u] = tau**2 * (alpha * pair_kl(p_t[label], p_s[label]) + beta * nckd)
    return gather(z_s, out)


def mse_logits(z_s, z_t, y, center=False):
    out = {}
    for u, s, t, _ in rows(z_s, z_t, y):
        gap = [a - b for a, b in zip(s, t, strict=True)]
        mean = sum(gap) / len(gap) if center else 0.0
        out[u] = sum((g - mean) ** 2 for g in gap) / len(gap)
    return gather(z_s, out)


def adakd(z_s, z_t, y, keep=0.5, c=0.5, rule="hellinger", base="reverse", detach_temperature=False):
    found = {u: (s, t) for u, s, t, _ in rows(z_s, z_t, y)}
    if not found:
        return gather(z_s, {})
    difficulty = {}
    for u, (s, t) in found.items():
        p_s, p_t = softmax(s), softmax(t)
        square = sum((torch.sqrt(a) - torch.sqrt(b)) ** 2 for a, b in zip(p_s, p_t, strict=True))
        difficulty[u] = torch.sqrt(square) / math.sqrt(2) if rule == "hellinger" else kl(p_s, p_t)
    hardest = sorted(found, key=lambda u: -difficulty[u].item())[: max(1, math.floor(keep * len(found)))]
    median = lower_median([difficulty[u] for u in hardest])
    out = {}
    for u in hardest:
        s, t = found[u]
        tau = torch.exp(-c * torch.tanh(torch.log(difficulty[u] / median)))
        tau = tau.detach() if detach_temperature else tau
        a, b = softmax(s, tau), softmax(t, tau)
        out[u] = len(found) / len(hardest) * tau**2 * (kl(a, b) if base == "reverse" else kl(b, a))
    return gather(z_s, out)


def sekd(z_s, z_t, y, tau=2.0, keep=0.2):
    found = {u: (s, t) for u, s, t, _ in rows(z_s, z_t, y)}
    if len(found) < 3 and keep < 1:
        return gather(z_s, {})
    unsure = {u: -sum(p.item() * math.log(p.item()) for p in softmax(s)) for u, (s, _) in found.items()}
    kept = sorted(found, key=lambda u: -unsure[u])[: math.ceil(keep * len(found))]
    return gather(z_s, {u: len(found) / len(kept) * tau**2 * kl(softmax(t, tau), softmax(s, tau))
                        for u, (s, t) in found.items() if u in kept})  # fmt: skip


def bdl(z_s, z_t, y, lam=0.9):
    out = {}
    for u, s, t, _ in rows(z_s, z_t, y):
        p_s, p_t = softmax(s), softmax(t)
        out[u] = kl(mixture(lam, p_s, p_t), mixture(lam, p_t, p_s))
    return gather(z_s, out)


def skew_fkl(z_s, z_t, y, lam=0.1):
    return gather(z_s, {u: kl(softmax(t), mixture(lam, softmax(t), softmax(s))) for u, s, t, _ in rows(z_s, z_t, y)})


def skew_rkl(z_s, z_t, y, lam=0.1):
    return gather(z_s, {u: kl(softmax(s), mixture(lam, softmax(s), softmax(t))) for u, s, t, _ in rows(z_s, z_t, y)})


def abkd(z_s, z_t, y, alpha=0.2, beta=0.7):
    a, b, s = alpha, beta, alpha + beta
    if a == b == 0:
        term = lambda p, q: torch.log(q / p) ** 2 / 2  # noqa: E731
    elif a == 0:
        term = lambda p, q: (b * q**b * torch.log(q / p) - q**b + p**b) / b**2  # noqa: E731
    elif b == 0:
        term = lambda p, q: (a * p**a * torch.log(p / q) - p**a + q**a) / a**2  # noqa: E731
    elif s == 0:
        term = lambda p, q: (a * torch.log(q / p) + (p / q) ** a - 1) / a**2  # noqa: E731
    else:
        term = lambda p, q: -(p**a * q**b - a / s * p**s - b / s * q**s) / (a * b)  # noqa: E731
    return gather(z_s, {u: sum(term(p, q) for p, q in zip(softmax(t), softmax(s), strict=True))
                        for u, s, t, _ in rows(z_s, z_t, y)})  # fmt: skip


def akl(z_s, z_t, y, mu=0.5):
    out = {}
    for u, s, t, _ in rows(z_s, z_t, y):
        q, p = softmax(s), softmax(t)
        error = [abs(a - b).item() for a, b in zip(p, q, strict=True)]
        up_to = [sum(p[j].item() for j in range(len(t)) if t[j] >= t[i]) for i in range(len(t))]
        head = [i for i in range(len(t)) if up_to[i] <= mu or t[i] == max(t)]
        h = sum(error[i] for i in head) / sum(error)
        out[u] = h * kl(p, q) + (1 - h) * kl(q, p)
    return gather(z_s, out)


def todi(z_s, z_t, y, tau=1.0):
    out = {}
    for u, s, t, _ in rows(z_s, z_t, y):
        q, p = softmax(s, tau), softmax(t, tau)
        w = [(a / (a + b)).item() for a, b in zip(p, q, strict=True)]
        forward, reverse = ([a * torch.log(a / b) for a, b in zip(*of, strict=True)] for of in ((p, q), (q, p)))
        out[u] = sum(w[i] * forward[i] + (1 - w[i]) * reverse[i] for i in range(len(w)))
    return gather(z_s, out)


def taid(z_s, z_t, y, t=0.4, t_end=1.0):
    out = {}
    for u, s, z, _ in rows(z_s, z_t, y):
        target = softmax([(1 - t) * a.detach() + t * b for a, b in zip(s, z, strict=True)])
        out[u] = kl(target, softmax(s))
    return gather(z_s, out)
