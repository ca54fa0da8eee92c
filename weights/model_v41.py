"""weights/mini-v41 in PyTorch: the deepseek_v41 architecture at 7 million parameters, written to be trained; model.py's sister.

Rows carry two residual streams.  A layer attends to the last 128 positions and, from layer 1 on, to compressed rows that layers 1, 3 (of two
positions each) and 4 (of one) make and that layers 1, 3, 4 and 6 select from; layer 6 only inside the blocks that layer 4 kept.  Dense
attention (phases A and B) takes every compressed row in sight instead.  Matrices are rounded to what the file stores while they are
trained, see Rounding.  Drafter is DSpark's three stages, trained afterwards.  export_v41.py knows the published names.
"""
import math, os
from dataclasses import dataclass
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import model as M
from model import cast

HERE = os.path.dirname(os.path.abspath(__file__))
EPS, HC_EPS, SINKHORN = 1e-20, 1e-6, 20


@dataclass
class Config:
    vocab: int = 4096
    hidden: int = 256
    layers: int = 8
    heads: int = 8
    head_dim: int = 64
    rope: int = 32
    q_lora: int = 96
    o_groups: int = 4
    o_lora: int = 32
    streams: int = 2
    window: int = 128
    experts: int = 8                # routed; one shared expert is stacked behind them
    top: int = 2
    inner: int = 64
    route_scale: float = 1.5
    limit: float = 10.0
    ratios: tuple = (0, 2, 2, 2, 1, 1, 1, 1)
    sources: tuple = (1, 3, 4)      # make compressed rows
    selectors: tuple = (1, 3, 4, 6)
    index_heads: int = 4
    index_dim: int = 64
    topk: int = 128
    candidate_layer: int = 4
    candidate_blocks: int = 64
    candidate_size: int = 8
    theta: float = 1e4
    compress_theta: float = 1.6e5
    yarn: tuple = (16, 32, 1, 65536)            # factor, beta fast, beta slow, original length
    engram_layers: tuple = (1, 4)
    engram_order: int = 4
    engram_heads: int = 2
    engram_dim: int = 32
    engram_vocab: int = 1500
    engram_pad: int = 4066
    engram_known: int = 0           # different tokens for Engram
    stages: int = 3                 # of DSpark
    taps: tuple = (5, 6, 7)
    block: int = 5
    noise: int = 4069
    rank: int = 16
    draft_experts: int = 4
    draft_top: int = 2

    def primes(self):
        """The sizes of Engram's tables: ascending over layer, n-gram and head, none twice."""
        out, p = {}, self.engram_vocab - 1
        for i in self.engram_layers:
            out[i] = []
            while len(out[i]) < (self.engram_order - 1) * self.engram_heads:
                p += 1
                if all(p % d for d in range(2, int(p ** 0.5) + 1)):
                    out[i].append(p)
        return out

    def multipliers(self, layer):
        bound = max(1, (2 ** 63 - 1) // self.engram_known // 2)
        return np.random.default_rng(10007 * layer).integers(0, bound, size=self.engram_order, dtype=np.int64) * 2 + 1


# The pieces below work on flat rows [N, ...], so that one compiled graph serves every layer, batch and length.

def rms(x, w):
    x = x.float()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * w).to(torch.bfloat16 if M.LOW else torch.float32)


def rotate(x, cos, sin):
    """Interleaved pairs of the last values turn; x [N, ..., d], cos and sin [N, rope/2]."""
    n = 2 * cos.shape[-1]
    a, b = x[..., -n:].float().unflatten(-1, (-1, 2)).unbind(-1)
    c, s = (cos, sin) if x.dim() == 2 else (cos[:, None], sin[:, None])
    return torch.cat((x[..., :-n], torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2).to(x.dtype)), -1)


def doubly_stochastic(l):
    """[N, S, S]: twenty rounds as published; for two streams, trained, what the rounds come to."""
    if M.LOW:
        p = torch.sigmoid((l[:, 0, 0] + l[:, 1, 1] - l[:, 0, 1] - l[:, 1, 0]) / 2)
        return torch.stack((torch.stack((p, 1 - p), -1), torch.stack((1 - p, p), -1)), -2)
    x = l.softmax(-1) + HC_EPS
    x = x / (x.sum(-2, keepdim=True) + HC_EPS)
    for _ in range(SINKHORN - 1):
        x = x / (x.sum(-1, keepdim=True) + HC_EPS)
        x = x / (x.sum(-2, keepdim=True) + HC_EPS)
    return x


def mix(h, fn, base, scale):
    """Streams h [N, S, H] -> how they are collapsed [N, S], what a layer adds to each [N, S], and how they mix [N, from, to]."""
    S, f = h.shape[1], h.flatten(1)
    m = (f @ cast(fn).T).float() * torch.rsqrt(f.float().square().mean(-1, keepdim=True) + EPS)
    pre = torch.sigmoid(m[:, :S] * scale[0] + base[:S]) + HC_EPS
    post = 2 * torch.sigmoid(m[:, S:2 * S] * scale[1] + base[S:2 * S])
    return pre, post, doubly_stochastic((m[:, 2 * S:] * scale[2] + base[2 * S:]).unflatten(-1, (S, S)))


def collapse(h, pre):
    return (pre[..., None] * h.float()).sum(1)


def join(h, y, post, comb):
    x = post[..., None] * y.float()[:, None] + (comb[..., None] * h.float()[:, :, None]).sum(1)
    return x.to(h.dtype)


def before_attention(h, carry, cos, sin, fn, base, scale, norm, wq_a, q_norm, wq_b, wkv, kv_norm, heads):
    pre, post, comb = mix(h, fn, base, scale)
    x = rms(collapse(h, carry), norm)
    qr = rms(x @ cast(wq_a).T, q_norm)
    q = rotate((qr @ cast(wq_b).T).unflatten(-1, (heads, -1)), cos, sin)
    return x, qr, q, rotate(rms(x @ cast(wkv).T, kv_norm), cos, sin), pre, post, comb


def after_attention(h, att, lse, cos, sin, pre, post, comb, sink, wo_a, wo_b, fn, base, scale, norm, router, bias, gate_up, down, top, route_scale, limit):
    """The sink takes its part of the attention; all experts are computed and the unchosen ones multiplied by nothing."""
    o = (att.float() * torch.sigmoid(lse - sink)[..., None]).to(att.dtype)
    o = rotate(o, cos, -sin)
    G = wo_a.shape[0]
    o = torch.einsum('ngd,gkd->ngk', o.flatten(1).unflatten(-1, (G, -1)), cast(wo_a))
    h = join(h, o.flatten(1) @ cast(wo_b).T, post, comb)
    carry, post, comb = mix(h, fn, base, scale)
    xn = rms(collapse(h, pre), norm)
    s = F.softplus(xn.float() @ router.T).sqrt()
    pick = s.detach() + bias
    e = torch.arange(s.shape[-1], device=s.device)
    chosen = e == pick.argmax(-1, keepdim=True)
    for _ in range(top - 1):
        chosen = chosen | (e == pick.masked_fill(chosen, -1e9).argmax(-1, keepdim=True))
    w = s * chosen
    w = w / (w.sum(-1, keepdim=True) + 1e-20) * route_scale
    w = torch.cat((w, torch.ones_like(w[:, :1])), -1)
    E, _, inner, H = gate_up.shape
    gu = (xn @ cast(gate_up).reshape(-1, H).T).view(-1, E, 2, inner)
    act = F.silu(gu[:, :, 0].clamp(max=limit)) * gu[:, :, 1].clamp(-limit, limit) * w.to(gu.dtype)[..., None]
    y = act.reshape(-1, E * inner) @ cast(down).reshape(-1, H)
    return join(h, y, post, comb), carry, chosen.float().mean(0)


def memory(h, found, wkv, q_weight, k_weight):
    """Engram: what was found for the last few tokens, gated for each stream."""
    S, H = h.shape[1:]
    kv = (found @ cast(wkv).T).float()
    key, value, x = kv[:, :S * H].unflatten(-1, (S, H)), kv[:, S * H:], h.float()
    norm = lambda v: torch.rsqrt(v.square().mean(-1) + EPS)
    dot = (x * (q_weight * k_weight) * key).sum(-1) * norm(x) * norm(key) * H ** -0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot))
    return (x + gate[..., None] * value[:, None]).to(h.dtype)


def lm_loss(y, norm, embed, targets, weights):
    ce = F.cross_entropy((rms(y, norm) @ cast(embed).T).float(), targets, reduction='none')
    w = weights.float()
    return (ce * w).sum() / w.sum().clamp(min=1)


def target_map(q, near, valid, entries, seen, sink):
    """Dense attention to compressed rows, summed over heads: q [B, S, heads, d], near [B, S, W, d] with valid [B, S, W], entries [B, E, d] -> [B, S, E]."""
    d = q.shape[-1] ** -0.5
    a = (torch.einsum('bshd,bswd->bhsw', q, near).float() * d).masked_fill(~valid[:, None], -1e30)
    b = torch.einsum('bshd,bed->bhse', q, entries).float() * d
    b = b.masked_fill(torch.arange(entries.shape[1], device=q.device) >= seen[:, None, :, None], -1e30)
    total = torch.logaddexp(torch.logaddexp(a.logsumexp(-1), b.logsumexp(-1)), sink[None, :, None])
    return (b - total[..., None]).exp().sum(1)


def index_kl(target, qi, w, ki, seen, chosen):
    """KL from the attention to the indexer's distribution, half of it over the chosen rows alone, all renormalised."""
    s = torch.relu(torch.einsum('bshd,bed->bhse', qi, ki).float() * qi.shape[-1] ** -0.5)
    s = (s * w.transpose(1, 2)[..., None]).sum(1)

    def kl(t, s):
        t = t / t.sum(-1, keepdim=True).clamp(min=1e-9)
        return (t * (t.clamp(min=1e-9).log() - s.log_softmax(-1))).sum(-1).mean()
    dead = torch.arange(ki.shape[1], device=ki.device) >= seen[..., None]
    return 0.5 * kl(target, s.masked_fill(dead, -1e30)) + 0.5 * kl(target * chosen, s.masked_fill(~chosen, -1e30))


def draft_loss(y, th, prev, w, norm, head, embed2, head2, conf):
    """Rows are drafted places: y [n, H] before the norm, th the target's normed row that predicts the same place.  Cross-entropy to the target's
    distribution and to its choice, and the confidence: how much of the two distributions is common."""
    e = F.embedding(prev, embed2)
    logits, t = (rms(y, norm) @ cast(head).T).float() + (cast(e) @ cast(head2).T).float(), (th @ cast(head).T).float()
    lp, p, best = logits.log_softmax(-1), t.softmax(-1), t.argmax(-1)
    ce = -0.5 * (p * lp).sum(-1) - 0.5 * lp.gather(1, best[:, None])[:, 0]
    common = 1 - 0.5 * (lp.detach().exp() - p).abs().sum(-1)
    z = torch.cat((y.float(), e), -1) @ conf[0]
    bce = F.binary_cross_entropy_with_logits(z, common.clamp(0, 1), reduction='none')
    with torch.no_grad():
        hit = (logits.argmax(-1) == best).float()
    return ((ce + bce) * w).sum() / w.sum().clamp(min=1e-6), hit


# ---- the model

def weight(*shape, gain=1.0):
    return nn.Parameter(torch.randn(*shape) * gain * shape[-1] ** -0.5)


def ones(n):
    return nn.Parameter(torch.ones(n))


class Streams(nn.Module):
    """What mixes the streams at one place.  Streams start almost apart, and unlike each other, or they would stay the same."""

    def __init__(self, c, i):
        super().__init__()
        S = c.streams
        self.fn = weight((2 + S) * S, S * c.hidden, gain=0.1)
        lean = torch.tensor([0.5 if (j + i) % S else -0.5 for j in range(S)])
        self.base = nn.Parameter(torch.cat((lean, -lean, (2 * torch.eye(S) - 1).flatten())))
        self.scale = ones(3)


class Block(nn.Module):
    """A layer, or a stage of DSpark (ratio 0)."""

    def __init__(self, c, i, experts, ratio=0, source=False, selects=False, engram=0):
        super().__init__()
        self.i, self.ratio, self.source, self.selects, self.engram, self.moe = i, ratio, source, selects, engram, True
        last = (2 * c.layers) ** -0.5
        self.norm, self.post_norm, self.q_norm, self.kv_norm = ones(c.hidden), ones(c.hidden), ones(c.q_lora), ones(c.head_dim)
        self.wq_a, self.wq_b, self.wkv = weight(c.q_lora, c.hidden), weight(c.heads * c.head_dim, c.q_lora), weight(c.head_dim, c.hidden)
        self.wo_a = weight(c.o_groups, c.o_lora, c.heads * c.head_dim // c.o_groups)
        self.wo_b = weight(c.hidden, c.o_groups * c.o_lora, gain=last)
        self.sink = nn.Parameter(torch.zeros(c.heads))
        self.hc_attn, self.hc_ffn = Streams(c, i), Streams(c, i + 1)
        self.router = weight(experts, c.hidden)
        self.register_buffer('bias', torch.zeros(experts))
        self.gate_up = weight(experts + 1, 2, c.inner, c.hidden)
        self.down = nn.Parameter(torch.randn(experts + 1, c.inner, c.hidden) * last * c.inner ** -0.5)     # transposed: [inner, hidden]
        if source:
            self.c_wkv, self.c_norm = weight(c.head_dim, c.hidden), ones(c.head_dim)
            if ratio > 1:
                self.c_gate = weight(c.head_dim, c.hidden)
            self.wk, self.k_norm = weight(c.index_dim, c.head_dim), ones(c.index_dim)
        if selects:
            self.iq_b, self.w_proj = weight(c.index_heads * c.index_dim, c.q_lora), weight(c.index_heads, c.hidden)
        if engram:
            columns = (c.engram_order - 1) * c.engram_heads
            self.table = nn.Parameter(torch.randn(engram, c.engram_dim) * 0.5)
            self.e_wkv = nn.Parameter(torch.randn(c.streams + 1, c.hidden, columns * c.engram_dim) * (columns * c.engram_dim) ** -0.5 * torch.tensor([1.0] * c.streams + [0.2])[:, None, None])
            self.e_q, self.e_k = nn.Parameter(torch.ones(c.streams, c.hidden)), nn.Parameter(torch.ones(c.streams, c.hidden))

    def indexer_parameters(self):
        return ([self.wk, self.k_norm] if self.source else []) + ([self.iq_b, self.w_proj] if self.selects else [])

    def before(self, f, c, h, carry, cos, sin):
        a = self.hc_attn
        return f['before_attention'](h, carry, cos, sin, a.fn, a.base, a.scale, self.norm, self.wq_a, self.q_norm, self.wq_b, self.wkv, self.kv_norm, c.heads)

    def after(self, f, c, h, att, lse, cos, sin, pre, post, comb, top):
        m = self.hc_ffn
        return f['after_attention'](h, att, lse, cos, sin, pre, post, comb, self.sink, self.wo_a, self.wo_b, m.fn, m.base, m.scale, self.post_norm, self.router, self.bias, self.gate_up, self.down,
                                    top, c.route_scale, c.limit)

    def stored(self):
        """(kind, matrix or matrices [..., out, in]) of what the file rounds: 8 bits by 32 x 32, 4 bits or 8 bits by 32 of a row."""
        E = self.bias.shape[0]
        out = [(8, t) for t in (self.wq_a, self.wq_b, self.wkv, self.wo_a, self.wo_b, self.gate_up[E:], self.down[E:])]
        out += [(4, self.gate_up[:E]), (4, self.down[:E].mT)]
        if self.selects:
            out.append((8, self.iq_b))
        if self.engram:
            out += [(8, self.e_wkv), (1, self.table)]
        return out


class Mini(nn.Module):
    def __init__(self, c, token_map, compiled=False):
        super().__init__()
        self.c = c
        self.embed = nn.Parameter(torch.randn(c.vocab, c.hidden) * 0.05)        # also the head
        self.norm = ones(c.hidden)
        primes = c.primes()
        self.blocks = nn.ModuleList(Block(c, i, c.experts, c.ratios[i], i in c.sources, i in c.selectors, sum(primes.get(i, ()))) for i in range(c.layers))
        self.draft = Drafter(c)
        wrap = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
        self.f = {name: wrap(f) for name, f in PIECES.items()}
        self.compiled, self.tables, self.masks = compiled, {}, {}
        self.register_buffer('token_map', torch.tensor(token_map), persistent=False)
        self.pad_known = token_map[c.engram_pad]
        for i in c.engram_layers:
            self.register_buffer('hash%d' % i, torch.from_numpy(c.multipliers(i)), persistent=False)
            self.register_buffer('prime%d' % i, torch.tensor(primes[i]), persistent=False)

    def stored(self):
        return [x for b in list(self.blocks) + list(self.draft.stages) for x in b.stored()] + [(8, self.draft.main_proj)]

    def angles(self, B, T, device, wide):
        if (B, T, wide) not in self.tables:
            inv = torch.tensor(frequencies(self.c, wide), dtype=torch.float32, device=device)
            a = torch.arange(T, device=device).float()[:, None] * inv
            self.tables[B, T, wide] = a.cos().repeat(B, 1), a.sin().repeat(B, 1)
        return self.tables[B, T, wide]

    def engram_rows(self, ids, i):
        c, (B, T) = self.c, ids.shape
        mult, primes = getattr(self, 'hash%d' % i), getattr(self, 'prime%d' % i)
        known = F.pad(self.token_map[ids], (c.engram_order - 1, 0), value=self.pad_known)
        x, cols = known[:, c.engram_order - 1:] * mult[0], []
        for k in range(1, c.engram_order):
            x = x ^ known[:, c.engram_order - 1 - k:c.engram_order - 1 - k + T] * mult[k]
            cols.append(x[..., None] % primes[(k - 1) * c.engram_heads:k * c.engram_heads])
        return (torch.cat(cols, -1) + (primes.cumsum(0) - primes)).view(B * T, -1)

    def in_sight(self, B, T, ratio, device):
        """Which compressed rows [B, T, T] (at most one for each position) each row may see, with flex_attention's blocks."""
        key = (B, T, ratio)
        if key not in self.masks:
            seen = (torch.arange(T, device=device)[:, None] + 1) // ratio if ratio else torch.zeros(T, 1, dtype=torch.long, device=device)
            m = (torch.arange(T, device=device) < seen).expand(B, T, T).contiguous()
            self.masks[key] = (m, flex_blocks(m, ratio, self.c.window) if self.compiled and T % 128 == 0 else None)
        return self.masks[key]

    def select(self, b, B, T, qi, w, ki, device):
        """The best rows in sight: as a mask [B, T, T], kept for the layer until the next step, and, on a GPU, as a list [B, T, topk]."""
        key, c = (B, T, 'layer%d' % b.i), self.c
        if key not in self.masks:
            self.masks[key] = torch.zeros(B, T, T, dtype=torch.bool, device=device)
        m, chosen = self.masks[key], torch.empty(B, T, c.topk, dtype=torch.int32, device=device)
        inside = self.inside if b.i > c.candidate_layer else None
        with torch.no_grad():
            if not m.is_cuda:
                self.select_plain(b, qi, w, ki, m, inside)
                return m, None
            s = M.scores_triton(qi, w, ki, b.ratio)
            if b.i == c.candidate_layer:
                n = T // c.candidate_size
                best = torch.empty(B, T, n, device=device)
                self.inside = torch.empty(B, T, n, dtype=torch.bool, device=device)
                M.blocks_kernel[(T, B)](s, best, T, b.ratio, BLOCK=M.triton.next_power_of_2(T), SIZE=c.candidate_size, num_warps=8 if T > 2048 else 4)
                M.choose_triton(best, self.inside, c.candidate_blocks, b.ratio, c.candidate_size)
            M.choose_triton(s, m, c.topk, b.ratio, 1, inside, 0 if inside is None else c.candidate_size, chosen)
        return m, chosen

    def select_plain(self, b, qi, w, ki, m, inside, at=0):
        """The same of rows from position `at` on.  Stable sorts: the lower index wins a tie."""
        c, T, E = self.c, m.shape[1], ki.shape[1]
        s = torch.relu(torch.einsum('bthd,bed->bhte', qi.float(), ki.float()) * qi.shape[-1] ** -0.5)
        s = (s * w.transpose(1, 2)[..., None]).sum(1)
        seen = (torch.arange(at, at + T, device=s.device)[:, None] + 1) // b.ratio
        s = s.masked_fill(torch.arange(E, device=s.device) >= seen, -math.inf)
        if b.i == c.candidate_layer:
            n, size = -(-E // c.candidate_size), c.candidate_size
            best = F.pad(s, (0, n * size - E), value=-math.inf).unflatten(-1, (n, size)).amax(-1)
            best = best.masked_fill(torch.arange(n, device=s.device) == (seen - 1) // size, math.inf)
            self.inside = best_of(best, c.candidate_blocks)
        if inside is not None:
            s = s.masked_fill(~inside.repeat_interleave(c.candidate_size, -1)[..., :E], -math.inf)
        m.zero_()
        m[..., :E] = best_of(s, c.topk)

    def forward(self, ids, sparse=False, kl_pos=None, hidden_taps=None):
        """ids [B, T] -> collapsed final rows [B*T, hidden] before the last norm, expert loads, KL terms of the selectors (if kl_pos [B, S] is given)."""
        c, f, dev = self.c, self.f, ids.device
        B, T = ids.shape
        x = cast(F.embedding(ids.reshape(-1), self.embed))
        h = x[:, None].expand(-1, c.streams, -1).contiguous()
        carry = torch.zeros(B * T, c.streams, device=dev)
        carry[:, 0] = 1
        loads, kls, target, pending, pick = [], [], None, None, None
        rows = None if kl_pos is None else (kl_pos + torch.arange(B, device=dev)[:, None] * T).reshape(-1)
        if rows is not None:
            near = (kl_pos[..., None] - torch.arange(c.window, device=dev)).flatten(1)
            valid = near.view(B, -1, c.window) >= 0
            near = (near.clamp(min=0) + torch.arange(B, device=dev)[:, None] * T).reshape(-1)
        for b in self.blocks:
            if b.engram:
                h = f['memory'](h, F.embedding(self.engram_rows(ids, b.i), cast(b.table)).flatten(1), b.e_wkv.flatten(0, 1), b.e_q, b.e_k)
            if hidden_taps is not None and b.i in c.taps:
                hidden_taps.append(h.detach().float().mean(1).to(h.dtype))
            cos, sin = self.angles(B, T, dev, b.ratio > 0)
            xn, qr, q, kv, pre, post, comb = b.before(f, c, h, carry, cos, sin)
            if b.source:
                entries, keys = self.compress(b, xn, B, T, cos, sin)
            if b.selects and (sparse or rows is not None):
                xd, qd = xn.detach(), qr.detach()
                if sparse:
                    with torch.no_grad():
                        qi, w = index_q(b, c, qd, xd, cos, sin)
                        pick = self.select(b, B, T, qi.view(B, T, c.index_heads, -1), w.view(B, T, -1), keys.detach(), dev)
                if rows is not None:
                    seen = (kl_pos + 1) // b.ratio
                    qi, w = index_q(b, c, qd[rows], xd[rows], cos[rows], sin[rows])
                    pending, target = (qi.view(B, -1, c.index_heads, c.index_dim), w.view(B, -1, c.index_heads), F.pad(keys, (0, 0, 0, T - keys.shape[1]))), 0
            far = entries if b.ratio else torch.zeros_like(kv).view(B, T, -1)
            see, blocks = self.in_sight(B, T, 0 if sparse else b.ratio, dev)    # sparse: of the window alone, then of what is chosen
            if rows is not None and b.ratio:                                    # a selector learns the attention of all layers that use its selection
                with torch.no_grad():
                    target = target + f['target_map'](q.detach()[rows].view(B, -1, c.heads, c.head_dim), kv.detach()[near].view(B, -1, c.window, c.head_dim), valid, far.detach(), seen, b.sink)
                if b.i + 1 == c.layers or (b.i + 1) in c.selectors:
                    chosen = (pick[0] if sparse else see).flatten(0, 1)[rows].view(B, -1, T)
                    kls.append(f['index_kl'](target, *pending, seen, chosen))
            q, near_kv = q.view(B, T, c.heads, -1), kv.view(B, T, -1)
            if sparse and b.ratio and pick[1] is not None:
                att, lse = f['merge'](*attend(q, near_kv, torch.zeros_like(far), see, blocks, c.window), *Chosen.apply(q, far, pick[1]))
            else:
                att, lse = attend(q, near_kv, far, pick[0] if sparse and b.ratio else see, blocks, c.window)
            h, carry, load = b.after(f, c, h, att.reshape(B * T, c.heads, -1), lse.reshape(B * T, c.heads), cos, sin, pre, post, comb, c.top)
            loads.append(load)
        return collapse(h, carry), loads, kls

    def compress(self, b, xn, B, T, cos, sin):
        """Compressed rows, padded to one for each position, and index keys, which learn from the indexer's loss alone."""
        c, R, E = self.c, b.ratio, T // b.ratio
        v = (xn @ cast(b.c_wkv).T).view(B, T, -1)[:, :E * R].float().unflatten(1, (E, R))
        if R > 1:
            v = v * (xn @ cast(b.c_gate).T).view(B, T, -1)[:, :E * R].float().unflatten(1, (E, R)).softmax(2)
        latent = rms(v.sum(2), b.c_norm).flatten(0, 1)
        at = lambda a: a.view(B, T, -1)[:, :E * R:R].flatten(0, 1)
        keys = rotate(rms(latent.detach() @ cast(b.wk).T, b.k_norm), at(cos), at(sin)).view(B, E, -1)
        return F.pad(rotate(latent, at(cos), at(sin)).view(B, E, -1), (0, 0, 0, T - E)), keys

    def normed(self, y):
        return rms(y, self.norm)

    def logits(self, y):
        return (self.normed(y) @ cast(self.embed).T).float()

    def loss(self, y, targets, weights):
        return self.f['lm_loss'](y, self.norm, self.embed, targets, weights)

    def sorted_parameters(self):
        """(matrices for Muon with their shapes, rows for Adam, the indexers', and what mixes streams, which bears small steps only)"""
        muon, adam, index, small = [], [self.embed, self.norm], [], []
        for b in self.blocks:
            index += b.indexer_parameters()
            sort_block(b, muon, adam, index, small)
        return muon, adam, index, small


def sort_block(b, muon, adam, index, small):
    for name, p in b.named_parameters():
        if any(p is q for q in index):
            continue
        if name.endswith('.fn'):
            small.append(p)
        elif p.dim() == 1 or name in ('router', 'table', 'e_q', 'e_k'):
            adam.append(p)
        else:
            muon.append((p, tuple(p.shape)))


def best_of(s, k):
    out = torch.zeros_like(s, dtype=torch.bool)
    return out.scatter_(-1, s.sort(dim=-1, descending=True, stable=True).indices[..., :k], True) & (s > -math.inf)


def index_q(b, c, qr, xn, cos, sin):
    q = rotate((qr @ cast(b.iq_b).T).unflatten(-1, (c.index_heads, -1)), cos, sin)
    return q, (xn.float() @ b.w_proj.T) * c.index_heads ** -0.5


def frequencies(c, wide):
    f = 1.0 / (c.compress_theta if wide else c.theta) ** (torch.arange(0, c.rope, 2, dtype=torch.float32) / c.rope)
    if wide:
        factor, fast, slow, length = c.yarn
        at = lambda turns: c.rope * np.log(length / (turns * 2 * np.pi)) / (2 * np.log(c.compress_theta))
        low, high = max(math.floor(at(fast)), 0), min(math.ceil(at(slow)), c.rope - 1)
        ramp = ((torch.arange(c.rope // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
        f = f / factor * ramp + f * (1 - ramp)
    return f.tolist()


def token_map(tokenizer, vocab):
    import engram_map
    return engram_map.token_map(tokenizer, vocab)


# ---- attention: of row t the last positions (key and value in one, for all heads) and compressed rows that a mask names

_flex = None

if M.triton is not None:
    import triton
    import triton.language as tl

    @triton.jit
    def chosen_kernel(q, kv, chosen, o, lse, T, scale, HEADS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, K: tl.constexpr):
        """One position: all its heads over its chosen rows."""
        t, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
        row, h, d = b * T + t, tl.arange(0, ROWS), tl.arange(0, D)
        i = tl.load(chosen + row * K + tl.arange(0, K))
        ok, mine = i >= 0, (row * HEADS + h[:, None]) * D + d[None, :]
        k = tl.load(kv + (b * T + i[:, None]) * D + d[None, :], mask=ok[:, None], other=0.0)
        x = tl.load(q + mine, mask=h[:, None] < HEADS, other=0.0)
        s = tl.where(ok[None, :], tl.dot(x, tl.trans(k)) * scale, -1e30)
        top = tl.max(s, 1)
        p = tl.where(ok[None, :], tl.exp(s - top[:, None]), 0.0)
        total = tl.sum(p, 1)
        y = tl.dot(p.to(k.dtype), k) / tl.maximum(total, 1e-30)[:, None]
        tl.store(o + mine, y.to(k.dtype), mask=h[:, None] < HEADS)
        tl.store(lse + row * HEADS + h, tl.where(total > 0, top + tl.log(tl.maximum(total, 1e-30)), -1e30), mask=h < HEADS)

    @triton.jit
    def chosen_backward(q, kv, chosen, o, lse, do, dlse, dq, dkv, T, scale, HEADS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, K: tl.constexpr):
        t, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
        row, h, d = b * T + t, tl.arange(0, ROWS), tl.arange(0, D)
        i = tl.load(chosen + row * K + tl.arange(0, K))
        ok, mine, there = i >= 0, (row * HEADS + h[:, None]) * D + d[None, :], h[:, None] < HEADS
        k = tl.load(kv + (b * T + i[:, None]) * D + d[None, :], mask=ok[:, None], other=0.0)
        x, y, dy = tl.load(q + mine, mask=there, other=0.0), tl.load(o + mine, mask=there, other=0.0), tl.load(do + mine, mask=there, other=0.0)
        l, dl = tl.load(lse + row * HEADS + h, mask=h < HEADS, other=0.0), tl.load(dlse + row * HEADS + h, mask=h < HEADS, other=0.0)
        p = tl.where(ok[None, :], tl.exp(tl.dot(x, tl.trans(k)) * scale - l[:, None]), 0.0)
        delta = tl.sum(y.to(tl.float32) * dy.to(tl.float32), 1)
        ds = p * (tl.dot(dy, tl.trans(k)) - delta[:, None] + dl[:, None]) * scale
        tl.store(dq + mine, tl.dot(ds.to(k.dtype), k).to(k.dtype), mask=there)
        dk = tl.dot(tl.trans(ds).to(k.dtype), x) + tl.dot(tl.trans(p).to(k.dtype), dy)
        tl.atomic_add(dkv + (b * T + i[:, None]) * D + d[None, :], dk, mask=ok[:, None], sem='relaxed')


class Chosen(torch.autograd.Function):
    """Attention to listed rows alone: q [B, T, heads, d], kv [B, T, d], chosen [B, T, K] int32 with -1 for none -> o and lse [B, T, heads]."""

    @staticmethod
    def forward(ctx, q, kv, chosen):
        q, kv = q.contiguous(), kv.contiguous()
        B, T, heads, d = q.shape
        o, lse = torch.empty_like(q), torch.empty(B, T, heads, device=q.device)
        chosen_kernel[(T, B)](q, kv, chosen, o, lse, T, d ** -0.5, HEADS=heads, ROWS=max(16, heads), D=d, K=chosen.shape[-1], num_warps=4)
        ctx.save_for_backward(q, kv, chosen, o, lse)
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        q, kv, chosen, o, lse = ctx.saved_tensors
        B, T, heads, d = q.shape
        dq, dkv = torch.empty_like(q), torch.zeros(kv.shape, device=q.device)
        chosen_backward[(T, B)](q, kv, chosen, o, lse, do.contiguous(), dlse.contiguous(), dq, dkv, T, d ** -0.5, HEADS=heads, ROWS=max(16, heads), D=d, K=chosen.shape[-1], num_warps=4)
        return dq, dkv.to(kv.dtype), None


def merge(o, lse, o2, lse2):
    """Two attentions over different rows are one."""
    both = torch.logaddexp(lse, lse2)
    x = o.float() * (lse - both).exp()[..., None] + o2.float() * (lse2 - both).exp()[..., None]
    return x.to(o.dtype), both


PIECES = {f.__name__: f for f in (before_attention, after_attention, memory, merge, lm_loss, target_map, index_kl, draft_loss)}


def flex_blocks(m, ratio, window):
    """Of each block of 128 rows: the blocks of the window, then those of compressed rows; what all rows of a block see needs no mask."""
    from torch.nn.attention.flex_attention import BlockMask
    T, dev = m.shape[1], m.device
    n, part, full = T // 128, [], []
    for i in range(n):
        first, last = ((128 * i + 1) // ratio, 128 * (i + 1) // ratio) if ratio else (0, 0)
        whole = [n + j for j in range(n) if 128 * (j + 1) <= first]
        part.append([j for j in range(i + 1) if 128 * (j + 1) > 128 * i - window + 1] + [n + j for j in range(n) if 128 * j < last and n + j not in whole])
        full.append(whole)

    def lists(x):
        idx = torch.zeros(1, 1, n, 2 * n, dtype=torch.int32)
        for i, r in enumerate(x):
            rest = [j for j in range(2 * n) if j not in set(r)]
            idx[0, 0, i] = torch.tensor(r + rest, dtype=torch.int32)
        return torch.tensor([[[len(r) for r in x]]], dtype=torch.int32, device=dev), idx.to(dev)

    def visible(b, h, q, k):
        return torch.where(k < T, (k <= q) & (k > q - window), m[b, q, torch.where(k < T, 0, k - T)])
    return BlockMask.from_kv_blocks(*lists(part), *lists(full), BLOCK_SIZE=128, mask_mod=visible)


def attend(q, near, far, mask, blocks, window):
    """q [B, T, heads, d], near and far [B, T, d], mask [B, T, T] over far -> [B, T, heads, d] and the log of the sum of weights [B, T, heads]."""
    global _flex
    q, kv = q.transpose(1, 2), torch.cat((near, far), 1)
    if blocks is not None:
        if _flex is None:
            from torch.nn.attention.flex_attention import flex_attention
            _flex = torch.compile(flex_attention, dynamic=False)
        o, lse = _flex(q, kv[:, None], kv[:, None], block_mask=blocks, enable_gqa=True, return_lse=True)
        return o.transpose(1, 2), lse.transpose(1, 2)
    T = near.shape[1]
    d = torch.arange(T, device=q.device)[:, None] - torch.arange(T, device=q.device)
    return attend_seen(q, kv, torch.cat((((d >= 0) & (d < window)).expand_as(mask), mask), -1))


def attend_seen(q, kv, see):
    """q [B, heads, T, d], kv [B, K, d], see [B, T, K]: plain, and what comes out as above."""
    s = (torch.einsum('bhtd,bkd->bhtk', q, kv).float() * q.shape[-1] ** -0.5).masked_fill(~see[:, None], -1e30)
    lse = s.logsumexp(-1)
    o = torch.einsum('bhtk,bkd->bthd', (s - lse[..., None]).exp().to(kv.dtype), kv)
    return o, lse.transpose(1, 2)


# ---- DSpark

class Drafter(nn.Module):
    """Stages that see the target's last layers of the positions before the block (main), at most `window`, and the whole block."""

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.main_proj, self.main_norm, self.norm = weight(c.hidden, c.hidden * len(c.taps)), ones(c.hidden), ones(c.hidden)
        self.stages = nn.ModuleList(Block(c, i, c.draft_experts) for i in range(c.stages))
        self.markov_embed, self.markov_head = nn.Parameter(torch.randn(c.vocab, c.rank) * 0.25), nn.Parameter(torch.zeros(c.vocab, c.rank))
        self.conf = nn.Parameter(torch.zeros(1, c.hidden + c.rank))

    def sorted_parameters(self):
        muon, adam, small = [(self.main_proj, tuple(self.main_proj.shape))], [self.main_norm, self.norm, self.markov_embed, self.markov_head, self.conf], []
        for b in self.stages:
            sort_block(b, muon, adam, [], small)
        return muon, adam, [], small

    def forward(self, net, taps, ids, at):
        """taps [B*T, 3H], ids [B, T], at [B, A]: positions of the last known tokens -> rows [B*A*block, H] before the norm; expert loads."""
        c, f, dev = self.c, net.f, ids.device
        (B, T), A = ids.shape, at.shape[1]
        N = B * A
        main = rms(taps @ cast(self.main_proj).T, self.main_norm)
        cos, sin = net.angles(B, T, dev, False)
        line = torch.arange(B, device=dev)[:, None] * T
        back = at[..., None] - 1 - torch.arange(c.window, device=dev)
        valid = torch.cat(((back >= 0).view(N, 1, -1), torch.ones(N, 1, c.block, dtype=torch.bool, device=dev)), -1)
        back = (back.clamp(min=0) + line[..., None]).view(N, -1)
        place = ((at + line)[..., None] + torch.arange(c.block, device=dev)).reshape(-1)
        bcos, bsin = cos[place], sin[place]
        x = torch.full((N, c.block), c.noise, device=dev)
        x[:, 0] = ids.gather(1, at).view(-1)
        h = cast(F.embedding(x.view(-1), net.embed.detach()))[:, None].expand(-1, c.streams, -1).contiguous()
        carry = torch.zeros(len(h), c.streams, device=dev)
        carry[:, 0] = 1
        loads = []
        for b in self.stages:
            _, _, q, kv, pre, post, comb = b.before(f, c, h, carry, bcos, bsin)
            ring = rotate(rms(main @ cast(b.wkv).T, b.kv_norm), cos, sin)
            bank = torch.cat((F.embedding(back, ring), kv.view(N, c.block, -1)), 1)
            s = torch.einsum('nthd,nkd->nhtk', q.view(N, c.block, c.heads, -1), bank).float() * c.head_dim ** -0.5
            s = s.masked_fill(~valid[:, None], -1e30)
            lse = s.logsumexp(-1)
            att = torch.einsum('nhtk,nkd->nthd', (s - lse[..., None]).exp().to(bank.dtype), bank)
            h, carry, load = b.after(f, c, h, att.reshape(-1, c.heads, c.head_dim), lse.transpose(1, 2).reshape(-1, c.heads), bcos, bsin, pre, post, comb, c.draft_top)
            loads.append(load)
        return collapse(h, carry), loads

    def loss(self, net, y, th, prev, w):
        return net.f['draft_loss'](y, th, prev, w, self.norm, net.embed.detach(), self.markov_embed, self.markov_head, self.conf)


def compare_kernels(net, B, T, log):
    """On a GPU: flex_attention, attention to chosen rows and the selections against plain PyTorch, on random rows."""
    c, g = net.c, torch.Generator(device='cuda').manual_seed(3)
    new = lambda *shape: torch.randn(*shape, device='cuda', generator=g).bfloat16()
    ts, dy = [new(B, T, c.heads, c.head_dim), new(B, T, c.head_dim), new(B, T, c.head_dim)], new(B, T, c.heads, c.head_dim)

    def errors(*ways):
        outs = []
        for way in ways:
            xs = [t.clone().requires_grad_() for t in ts]
            o, lse = way(*xs)
            y = o * torch.sigmoid(lse - 1)[..., None].to(o.dtype)
            outs.append([o.detach(), lse.detach()] + list(torch.autograd.grad(y, xs, dy)))
        e = [((x - y).float().norm() / y.float().norm()).item() for x, y in zip(*outs)]
        assert max(e) < 0.03, e
        return ['%.1e' % x for x in e]
    m, blocks = net.in_sight(B, T, 2, 'cuda')
    log('flex against plain attention, relative errors: %s' % errors(lambda *x: attend(*x, m, blocks, c.window), lambda *x: attend(*x, m, None, c.window)))
    for i in (1, 4, 6):
        b = net.blocks[i]
        args = new(B, T, c.index_heads, c.index_dim), torch.randn(B, T, c.index_heads, device='cuda', generator=g), new(B, T // b.ratio, c.index_dim)
        inside = net.inside if i > c.candidate_layer else None
        m, chosen = net.select(b, B, T, *args, 'cuda')
        mine, kept = m.clone(), net.inside if i == c.candidate_layer else None
        net.select_plain(b, *args, m, inside)
        log('layer %d: %d of %d entries of the selection differ, at most %d a row%s' % (i, (mine != m).sum(), m.sum(), mine.sum(-1).max(), '' if kept is None else ', %d of the kept blocks' % (kept != net.inside).sum()))
        m.copy_(mine)
    none, blocks = net.in_sight(B, T, 0, 'cuda')
    way = lambda q, near, far: merge(*attend(q, near, torch.zeros_like(far), none, blocks, c.window), *Chosen.apply(q, far, chosen))
    log('chosen rows against plain attention: %s' % errors(way, lambda *x: attend(*x, m, None, c.window)))


# ---- what the file stores

def exponent(x, top):
    """The least power of two by which x is at most top."""
    m, e = torch.frexp(x.clamp(min=1e-30) * torch.tensor(1.0 / top))
    return e.float() - (m == 0.5).float()


def e2m1(y):
    a = y.abs().clamp(max=6)
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))
    return torch.sign(y) * torch.round(a / step) * step


def quantise(kind, x):
    """Groups [n, m] that share an exponent -> (values, exponents [n, 1]).  Of 4 bits, the exponent below may do better, at the price of the largest."""
    if kind != 4:
        e = exponent(x.abs().amax(-1, keepdim=True), 448.0)
        return (x / torch.exp2(e)).to(torch.float8_e4m3fn).float(), e
    e = exponent(x.abs().amax(-1, keepdim=True), 6.0)
    y, z = e2m1(x / torch.exp2(e)), e2m1(x / torch.exp2(e - 1))
    less = (z * torch.exp2(e - 1) - x).square().sum(-1, keepdim=True) < (y * torch.exp2(e) - x).square().sum(-1, keepdim=True)
    return torch.where(less, z, y), e - less.float()


def groups(kind, t):
    """[..., R, C] -> [groups, members]"""
    if kind == 8:
        R, C = t.shape[-2:]
        return t.reshape(-1, R // 32, 32, C // 32, 32).transpose(2, 3).reshape(-1, 1024)
    return t.reshape(-1, 32)


def ungroup(kind, x, shape):
    if kind == 8:
        return x.view(-1, shape[-2] // 32, shape[-1] // 32, 32, 32).transpose(2, 3).reshape(shape)
    return x.view(shape)


class Rounding:
    """Puts the stored values into the parameters, and the trained ones back; gradients pass as if there were no rounding."""

    def __init__(self, stored, parameters):
        self.stored, self.parameters = [(k, t.detach()) for k, t in stored], [p.data for p in parameters]
        self.saved = [torch.empty_like(p) for p in self.parameters]

    @torch.no_grad()
    def enter(self):
        torch._foreach_copy_(self.saved, self.parameters)
        for kind in (8, 4, 1):
            ts = [t for k, t in self.stored if k == kind]
            if not ts:
                continue
            gs = [groups(kind, t) for t in ts]
            v, e = quantise(kind, torch.cat(gs))
            for t, x in zip(ts, (v * torch.exp2(e)).split([len(g) for g in gs])):
                t.copy_(ungroup(kind, x, t.shape))

    @torch.no_grad()
    def leave(self):
        torch._foreach_copy_(self.parameters, self.saved)
