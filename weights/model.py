"""weights/mini in PyTorch: the glm_moe_dsa architecture at 22 million parameters, written to be trained.

Dense attention is the library's; sparse attention is a selection made by two Triton kernels (the indexer's scores, then the exact
top 128 of every row) followed by flex_attention over that mask.  On a CPU, and for evaluation, plain PyTorch does the same.
The published tensor names and the FP8 layout are export.py's business; here experts lie stacked, for few and large products.
"""
import math
from dataclasses import dataclass
import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Config:
    vocab: int = 8192
    hidden: int = 320
    layers: int = 8
    heads: int = 8
    q_lora: int = 160
    kv_lora: int = 128
    nope: int = 32
    rope: int = 32
    v: int = 32
    dense_inner: int = 1024
    experts: int = 8                # routed; one shared expert is stacked behind them
    top: int = 2
    inner: int = 256
    route_scale: float = 1.5
    index_heads: int = 8
    index_dim: int = 64
    topk: int = 128
    theta: float = 1e6
    full: tuple = (0, 1, 2, 6)      # layers with an indexer; the others use the nearest earlier one's selection

    def producer(self, i):
        return max(f for f in self.full if f <= i)


def rms(x, w, eps):
    x = x.float()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w).to(torch.bfloat16 if LOW else torch.float32)


LOW = True                          # bf16 compute on the GPU; tests on the CPU switch it off


def cast(w):
    return w.to(torch.bfloat16) if LOW else w


def rotate(x, cos, sin):
    """Interleaved pairs: (x0, x1) turns by the angle of its frequency.  x [N, heads, d], cos and sin [N, d/2]."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    c, s = cos[:, None], sin[:, None]
    return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2).to(x.dtype)


# The pieces below work on flat rows [N, hidden], so that one compiled graph serves every layer, batch and length.

def before_attention(x, cos, sin, norm, q_a, q_norm, q_b, kv_a, kv_norm, kv_b, heads, nope, rope, v):
    """Rows -> normed rows, q latent, q, k, v of every head."""
    xn = rms(x, norm, 1e-5)
    qr = rms(xn @ cast(q_a).T, q_norm, 1e-6)
    q = (qr @ cast(q_b).T).unflatten(-1, (heads, nope + rope))
    q = torch.cat((q[..., :nope], rotate(q[..., nope:], cos, sin)), -1)
    ckv = xn @ cast(kv_a).T
    c = rms(ckv[:, :-rope], kv_norm, 1e-6)
    kr = rotate(ckv[:, None, -rope:], cos, sin)
    kv = (c @ cast(kv_b).T).unflatten(-1, (heads, nope + v))
    k = torch.cat((kv[..., :nope], kr.expand(-1, heads, -1)), -1)
    return xn, qr, q, k, kv[..., nope:].contiguous()


def index_q(qr, xn, cos, sin, wq_b, w_proj, heads, dim, rope):
    q = (qr @ cast(wq_b).T).unflatten(-1, (heads, dim))
    q = torch.cat((rotate(q[..., :rope], cos, sin), q[..., rope:]), -1)
    return q, (xn.float() @ w_proj.T) * heads ** -0.5


def index_k(xn, cos, sin, wk, kn_w, kn_b, rope):
    k = F.layer_norm((xn @ cast(wk).T).float(), (wk.shape[0],), kn_w, kn_b, 1e-6)
    k = k[:, None]
    return torch.cat((rotate(k[..., :rope], cos, sin), k[..., rope:]), -1)[:, 0].to(xn.dtype)


def after_attention_dense(x, att, o, norm, gate_up, down):
    x = x + att @ cast(o).T
    xn = rms(x, norm, 1e-5)
    g, u = (xn @ cast(gate_up).T).chunk(2, -1)
    return x + (F.silu(g) * u) @ cast(down)


def after_attention_moe(x, att, o, norm, router, bias, gate_up, down, scale):
    """All experts are computed and the unchosen ones multiplied by nothing: at this size faster than sorting rows by expert."""
    x = x + att @ cast(o).T
    xn = rms(x, norm, 1e-5)
    s = torch.sigmoid(xn.float() @ router.T)
    pick = s.detach() + bias
    e = torch.arange(s.shape[-1], device=s.device)
    first = e == pick.argmax(-1, keepdim=True)
    second = e == pick.masked_fill(first, -1e9).argmax(-1, keepdim=True)
    chosen = first | second
    w = s * chosen
    w = w / (w.sum(-1, keepdim=True) + 1e-20) * scale
    w = torch.cat((w, torch.ones_like(w[:, :1])), -1)                            # the shared expert is always in
    E, _, inner, H = gate_up.shape
    gu = (xn @ cast(gate_up).reshape(-1, H).T).view(-1, E, 2, inner)
    act = F.silu(gu[:, :, 0]) * gu[:, :, 1] * w.to(gu.dtype)[..., None]
    return x + act.reshape(-1, E * inner) @ cast(down).reshape(-1, H), chosen.float().mean(0)


def lm_loss(x, norm, embed, targets, weights):
    logits = (rms(x, norm, 1e-5) @ cast(embed).T).float()
    ce = F.cross_entropy(logits, targets, reduction='none')
    w = weights.float()
    return (ce * w).sum() / w.sum().clamp(min=1)


def target_map(q, k, pos):
    """Attention averaged over heads for a few query positions: q [B, S, heads, d], k [B, T, heads, d], pos [B, S] -> [B, S, T]."""
    a = torch.einsum('bshd,bthd->bhst', q, k).float() * q.shape[-1] ** -0.5
    a = a.masked_fill(torch.arange(k.shape[1], device=k.device) > pos[:, None, :, None], -1e30)
    return a.softmax(-1).mean(1)


def index_kl(target, qi, w, ki, pos, chosen):
    """KL from the attention map to the indexer's distribution; with a selection, half of it over the selected keys alone, both renormalised."""
    s = torch.relu(torch.einsum('bshd,btd->bhst', qi, ki).float() * qi.shape[-1] ** -0.5)
    s = (s * w.transpose(1, 2)[..., None]).sum(1)
    dead = torch.arange(ki.shape[1], device=ki.device) > pos[..., None]

    def kl(t, s):
        return (t * (t.clamp(min=1e-9).log() - s.log_softmax(-1))).sum(-1).mean()
    loss = kl(target, s.masked_fill(dead, -1e30))
    if chosen is None:
        return loss
    t = target * chosen
    return 0.5 * loss + 0.5 * kl(t / t.sum(-1, keepdim=True).clamp(min=1e-9), s.masked_fill(~chosen, -1e30))


class Block(nn.Module):
    def __init__(self, c, i):
        super().__init__()
        self.i, self.full, self.moe = i, i in c.full, i > 0

        def w(*shape, gain=1.0):
            return nn.Parameter(torch.randn(*shape) * gain * shape[-1] ** -0.5)
        one = lambda n: nn.Parameter(torch.ones(n))
        last = (2 * c.layers) ** -0.5
        self.norm, self.post_norm, self.q_norm, self.kv_norm = one(c.hidden), one(c.hidden), one(c.q_lora), one(c.kv_lora)
        self.q_a, self.q_b = w(c.q_lora, c.hidden), w(c.heads * (c.nope + c.rope), c.q_lora)
        self.kv_a, self.kv_b = w(c.kv_lora + c.rope, c.hidden), w(c.heads * (c.nope + c.v), c.kv_lora)
        self.o = w(c.hidden, c.heads * c.v, gain=last)
        if self.full:
            self.wq_b, self.wk, self.w_proj = w(c.index_heads * c.index_dim, c.q_lora), w(c.index_dim, c.hidden), w(c.index_heads, c.hidden)
            self.kn_w, self.kn_b = one(c.index_dim), nn.Parameter(torch.zeros(c.index_dim))
        if self.moe:
            self.router = w(c.experts, c.hidden)
            self.register_buffer('bias', torch.zeros(c.experts))
            self.gate_up = w(c.experts + 1, 2, c.inner, c.hidden)
            self.down = nn.Parameter(torch.randn(c.experts + 1, c.inner, c.hidden) * last * c.inner ** -0.5)        # transposed: [inner, hidden]
        else:
            self.gate_up = w(2 * c.dense_inner, c.hidden)
            self.down = nn.Parameter(torch.randn(c.dense_inner, c.hidden) * last * c.dense_inner ** -0.5)

    def indexer_parameters(self):
        return [self.wq_b, self.wk, self.w_proj, self.kn_w, self.kn_b] if self.full else []


class Mini(nn.Module):
    def __init__(self, c=Config(), compiled=False):
        super().__init__()
        self.c = c
        self.embed = nn.Parameter(torch.randn(c.vocab, c.hidden) * 0.05)        # also the head
        self.norm = nn.Parameter(torch.ones(c.hidden))
        self.blocks = nn.ModuleList(Block(c, i) for i in range(c.layers))
        wrap = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
        self.f = {f.__name__: wrap(f) for f in (before_attention, index_q, index_k, after_attention_dense, after_attention_moe, lm_loss, target_map, index_kl)}
        self.compiled, self.tables, self.masks = compiled, {}, {}

    def angles(self, B, T, device):
        if (B, T) not in self.tables:
            inv = self.c.theta ** (-torch.arange(0, self.c.rope, 2, device=device).float() / self.c.rope)
            a = torch.arange(T, device=device).float()[:, None] * inv
            self.tables[B, T] = a.cos().repeat(B, 1), a.sin().repeat(B, 1)
        return self.tables[B, T]

    def select(self, B, T, slot, qi, w, ki):
        """Boolean [B, T, T]: the keys each row may attend to.  One buffer per producer, since the backward pass reads it again."""
        key = (B, T, slot)
        if key not in self.masks:
            m = torch.empty(B, T, T, dtype=torch.bool, device=qi.device)
            self.masks[key] = (m, flex_blocks(m) if m.is_cuda and self.compiled and T % 128 == 0 else None)
        m, blocks = self.masks[key]
        with torch.no_grad():
            if m.is_cuda:
                select_triton(qi, w, ki, m, self.c.topk)
            else:
                select_torch(qi, w, ki, m, self.c.topk)
        return m, blocks

    def forward(self, ids, sparse=False, kl_pos=None, hidden_taps=None):
        """ids [B, T] -> final rows [B*T, hidden] before the last norm, expert loads, KL terms of the producers (if kl_pos [B, S] is given)."""
        c, f = self.c, self.f
        B, T = ids.shape
        cos, sin = self.angles(B, T, ids.device)
        x = cast(F.embedding(ids.reshape(-1), self.embed))
        loads, kls, mask, blocks, target, pending = [], [], None, None, None, None
        rows = None if kl_pos is None else (kl_pos + torch.arange(B, device=ids.device)[:, None] * T).reshape(-1)
        for b in self.blocks:
            xn, qr, q, k, v = f['before_attention'](x, cos, sin, b.norm, b.q_a, b.q_norm, b.q_b, b.kv_a, b.kv_norm, b.kv_b, c.heads, c.nope, c.rope, c.v)
            q4, k4 = q.view(B, T, c.heads, -1), k.view(B, T, c.heads, -1)
            if b.full and (sparse or rows is not None):
                xd, qd = xn.detach(), qr.detach()
                with torch.set_grad_enabled(rows is not None and torch.is_grad_enabled()):
                    ki = f['index_k'](xd, cos, sin, b.wk, b.kn_w, b.kn_b, c.rope)
                if sparse:
                    with torch.no_grad():
                        qi, w = f['index_q'](qd, xd, cos, sin, b.wq_b, b.w_proj, c.index_heads, c.index_dim, c.rope)
                        mask, blocks = self.select(B, T, b.i, qi.view(B, T, c.index_heads, -1), w.view(B, T, -1), ki.detach().view(B, T, -1))
                if rows is not None:
                    qi, w = f['index_q'](qd[rows], xd[rows], cos[rows], sin[rows], b.wq_b, b.w_proj, c.index_heads, c.index_dim, c.rope)
                    pending, target = (qi.view(B, -1, c.index_heads, c.index_dim), w.view(B, -1, c.index_heads), ki.view(B, T, -1), mask), []
            if rows is not None:                                                # a producer learns the mean attention of all layers that use its selection
                with torch.no_grad():
                    target.append(f['target_map'](q4.detach().flatten(0, 1)[rows].view(B, -1, c.heads, q4.shape[-1]), k4.detach(), kl_pos))
                if b.i + 1 == c.layers or (b.i + 1) in c.full:
                    qi, w, ki, m = pending
                    chosen = None if m is None else m.flatten(0, 1)[rows].view(B, -1, T)
                    kls.append(f['index_kl'](torch.stack(target).mean(0), qi, w, ki, kl_pos, chosen))
            att = attend(q4, k4, v.view(B, T, c.heads, -1), mask if sparse else None, blocks).reshape(B * T, -1)
            if b.moe:
                x, load = f['after_attention_moe'](x, att, b.o, b.post_norm, b.router, b.bias, b.gate_up, b.down, c.route_scale)
                loads.append(load)
            else:
                x = f['after_attention_dense'](x, att, b.o, b.post_norm, b.gate_up, b.down)
            if hidden_taps is not None:
                hidden_taps.append(x)
        return x, loads, kls

    def logits(self, x):
        return (rms(x, self.norm, 1e-5) @ cast(self.embed).T).float()

    def loss(self, x, targets, weights):
        return self.f['lm_loss'](x, self.norm, self.embed, targets, weights)


# ---- attention

_flex = None


def flex_blocks(m):
    """Every causal block of 128 x 128 is looked into; which of its keys count is read from the mask."""
    from torch.nn.attention.flex_attention import BlockMask
    n = m.shape[1] // 128
    num = torch.arange(1, n + 1, dtype=torch.int32, device=m.device)[None, None]
    idx = torch.arange(n, dtype=torch.int32, device=m.device).expand(1, 1, n, n).contiguous()

    def chosen(b, h, q, k):
        return m[b, q, k]
    return BlockMask.from_kv_blocks(num, idx, BLOCK_SIZE=128, mask_mod=chosen)


def attend(q, k, v, mask, blocks):
    """q, k [B, T, heads, 64], v [B, T, heads, 32] -> [B, T, heads, 32]"""
    global _flex
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if mask is None:
        n = v.shape[-1]
        return F.scaled_dot_product_attention(q, k, F.pad(v, (0, q.shape[-1] - n)), is_causal=True)[..., :n].transpose(1, 2)
    if blocks is None or not torch.is_grad_enabled():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None]).transpose(1, 2)
    if _flex is None:
        from torch.nn.attention.flex_attention import flex_attention
        _flex = torch.compile(flex_attention, dynamic=False)
    return _flex(q, k, F.pad(v, (0, q.shape[-1] - v.shape[-1])), block_mask=blocks)[..., :v.shape[-1]].transpose(1, 2)


def select_torch(qi, w, ki, m, topk):
    B, T = m.shape[:2]
    for b in range(B):
        s = (torch.relu(torch.einsum('thd,sd->hts', qi[b].float(), ki[b].float()) * qi.shape[-1] ** -0.5) * w[b].T[..., None]).sum(0)
        future = torch.ones(T, T, dtype=torch.bool, device=m.device).triu(1)
        s = s.masked_fill(future, -math.inf)
        order = s.sort(dim=-1, descending=True, stable=True).indices[:, :topk]      # stable: the lower index wins a tie
        m[b] = False
        m[b].scatter_(1, order, True)
        m[b] &= ~future


try:
    import triton
    import triton.language as tl

    @triton.jit
    def scores_kernel(q, w, k, s, T, E, ratio, scale, HEADS: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
        """Row t sees the first (t + 1) / ratio of E keys."""
        n, m, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
        if n * BN >= (m * BM + BM) // ratio:                                    # wholly in the future
            return
        rm, rn, rd = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN), tl.arange(0, D)
        kt = tl.load(k + (b * E + rn[None, :]) * D + rd[:, None], mask=rn[None, :] < E, other=0.0)
        acc = tl.zeros((BM, BN), tl.float32)
        for h in range(HEADS):
            qh = tl.load(q + ((b * T + rm[:, None]) * HEADS + h) * D + rd[None, :], mask=rm[:, None] < T, other=0.0)
            wh = tl.load(w + (b * T + rm) * HEADS + h, mask=rm < T, other=0.0)
            acc += tl.maximum(tl.dot(qh, kt) * scale, 0.0) * wh[:, None]
        tl.store(s + (b * T + rm[:, None]) * T + rn[None, :], acc, mask=(rm[:, None] < T) & (rn[None, :] < E))

    @triton.jit
    def choose_kernel(s, out, inside, chosen, T, width, ratio, K, BLOCK: tl.constexpr, GROUP: tl.constexpr, CANDIDATES: tl.constexpr, LIST: tl.constexpr):
        """Exact top K of one row of `width` scores, of which those of (t + 1) / ratio keys in groups are seen: the K-th largest score found
        bit by bit on integers in score order; the lower index wins a tie.  With CANDIDATES, only keys whose block of that many is `inside`.
        With LIST, `chosen` gets the indices too, ascending."""
        t, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
        r = tl.arange(0, BLOCK)
        row = (b * T + t) * width
        seen = ((t + 1) // ratio + GROUP - 1) // GROUP
        valid = r < seen
        if CANDIDATES > 0:
            valid = valid & (tl.load(inside + (b * T + t) * (width // CANDIDATES) + r // CANDIDATES, mask=valid, other=0) != 0)
        keep = valid
        if seen > K:
            bits = tl.load(s + row + r, mask=valid, other=0.0).to(tl.int32, bitcast=True)
            key = bits ^ ((bits >> 31) & 0x7fffffff)
            key = tl.where(valid, key, -2147483648)
            low = tl.full((), -2147483648, tl.int32)                            # the largest value with at least K keys at or above it
            count = tl.sum((key >= 0).to(tl.int32))
            low = tl.where(count >= K, 0, low)
            for i in range(31):
                c = low + (1 << (30 - i))
                count = tl.sum((key >= c).to(tl.int32))
                low = tl.where(count >= K, c, low)
            above = key > low
            tie = ((key == low) & valid).to(tl.int32)
            need = K - tl.sum(above.to(tl.int32))
            keep = above | ((tie == 1) & (tl.cumsum(tie, 0) <= need))
        tl.store(out + row + r, keep.to(tl.int8), mask=r < width)
        if LIST:
            tl.store(chosen + (b * T + t) * K + tl.cumsum(keep.to(tl.int32), 0) - 1, r, mask=keep)

    @triton.jit
    def blocks_kernel(s, out, T, ratio, BLOCK: tl.constexpr, SIZE: tl.constexpr):
        """The best score of each block of SIZE keys; the newest block is best of all."""
        t, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
        r, seen = tl.arange(0, BLOCK), (t + 1) // ratio
        x = tl.load(s + (b * T + t) * T + r, mask=r < seen, other=-float('inf'))
        best = tl.max(tl.reshape(x, (BLOCK // SIZE, SIZE)), axis=1)
        n = tl.arange(0, BLOCK // SIZE)
        best = tl.where(n == (seen - 1) // SIZE, float('inf'), best)
        tl.store(out + (b * T + t) * (T // SIZE) + n, best, mask=n < T // SIZE)
except ImportError:
    triton = None

_scores = {}


def score_buffer(B, T, device):
    """One for all selections: each uses up its scores at once."""
    if (B, T) not in _scores:
        _scores.clear()
        _scores[B, T] = torch.empty(B, T, T, dtype=torch.float32, device=device)
    return _scores[B, T]


def scores_triton(qi, w, ki, ratio=1):
    """Scores [B, T, T] of the first (t + 1) / ratio keys of row t, the rest undefined; qi [B, T, H, D], w [B, T, H], ki [B, E, D]."""
    B, T, H, D = qi.shape
    s = score_buffer(B, T, qi.device)
    scores_kernel[(triton.cdiv(ki.shape[1], 128), triton.cdiv(T, 128), B)](qi.contiguous(), w.contiguous(), ki.contiguous(), s, T, ki.shape[1], ratio, D ** -0.5, HEADS=H, D=D, BM=128, BN=128, num_warps=8)
    return s


def choose_triton(s, out, topk, ratio=1, group=1, inside=None, candidates=0, chosen=None):
    """out [B, T, width] boolean: the best topk of each row of s; chosen [B, T, topk] int32, their indices, then -1."""
    B, T, width = out.shape
    if chosen is not None:
        chosen.fill_(-1)
    mask = out.view(torch.int8)
    choose_kernel[(T, B)](s, mask, mask if inside is None else inside.view(torch.int8), mask if chosen is None else chosen, T, width, ratio, topk, BLOCK=triton.next_power_of_2(width), GROUP=group, CANDIDATES=candidates,
                          LIST=chosen is not None, num_warps=8 if width > 2048 else 4)


def select_triton(qi, w, ki, m, topk):
    choose_triton(scores_triton(qi, w, ki), m, topk)
