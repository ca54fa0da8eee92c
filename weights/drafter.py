"""The draft models in PyTorch: DFlash, DFlash 2 and DSpark as published, their block forward, proposals and losses.

    c_t = RMSNorm(fc [taps of target position t])              one vector for all draft layers; K and V of the context come from it
    block = [anchor, MASK, ...] at positions n, n+1, ...       sees context rows t < n inside the window, and the whole block
    DFlash, DFlash 2: slot i drafts position n+i (slot 0 is not used); DSpark: slot k drafts position n+k+1

Modules are named so that state_dict() has the published tensor names.  Embedding and head are the target's and never stored.
    python3 drafter.py --fixtures DIR...                       compares with golden values of the published code (../shared/fixtures/drafters)
"""
import json, math, os, sys
from dataclasses import dataclass
import torch
import torch.nn as nn
import torch.nn.functional as F
import model as M


@dataclass
class Config:
    kind: str = 'dflash2'           # dflash, dflash2, dspark
    hidden: int = 320
    inner: int = 768
    layers: int = 2
    heads: int = 8
    kv: int = 4
    hd: int = 64
    vocab: int = 8192
    taps: tuple = (2, 4, 6)         # residual stream after these target layers
    target_layers: int = 8
    block: int = 8                  # rows of a draft block
    window: int = 256               # 0: the whole context
    causal: bool = False            # inside the block
    mask: int = 8161
    theta: float = 1e4
    eps: float = 1e-6
    rank: int = 32                  # of the selector or the Markov head
    top: int = 16
    group: int = 16                 # channels that share a convolution coefficient
    softcap: float = 0.0
    multiplier: float = 1.0
    embed_scale: float = 1.0

    @property
    def drafts(self):
        return self.block if self.kind == 'dspark' else self.block - 1


ARCH = {'dflash': 'DFlashDraftModel', 'dflash2': 'DFlash2DraftModel', 'dspark': 'Qwen3DSparkModel'}


def read_config(d):
    """config.json of a published draft model -> Config; a missing tap list or block size is an error, as it is in tide."""
    f = d.get('dflash_config', {})
    val = lambda k, *dflt: f.get(k, d.get(k, *dflt))
    kind = {v: k for k, v in ARCH.items()}[d['architectures'][0]]
    window = [d['sliding_window'] if t == 'sliding_attention' else 0 for t in d['layer_types']]
    assert len(set(window)) == 1, 'layers with different windows'
    causal = d.get('is_causal')
    return Config(kind=kind, hidden=d['hidden_size'], inner=d['intermediate_size'], layers=d['num_hidden_layers'], heads=d['num_attention_heads'], kv=d['num_key_value_heads'], hd=d['head_dim'], vocab=d['vocab_size'],
                  taps=tuple(f['target_layer_ids'] if 'target_layer_ids' in f else d['target_layer_ids']), target_layers=d['num_target_layers'], block=f['block_size'] if 'block_size' in f else d['block_size'], window=window[0],
                  causal=bool(window[0]) if causal is None else causal, mask=val('mask_token_id'), theta=(d.get('rope_parameters') or d)['rope_theta'], eps=d['rms_norm_eps'], rank=val('selector_rank', d.get('markov_rank', 0)),
                  top=val('selector_top_k', 16), group=val('conv_group_size', 16), softcap=val('final_logit_softcapping', 0.0), multiplier=val('output_multiplier', 1.0), embed_scale=val('input_embedding_scale', 1.0))


def write_config(c):
    d = {'architectures': [ARCH[c.kind]], 'attention_bias': False, 'attention_dropout': 0.0, 'dtype': 'bfloat16', 'head_dim': c.hd, 'hidden_act': 'silu', 'hidden_size': c.hidden, 'initializer_range': 0.02,
         'intermediate_size': c.inner, 'max_position_embeddings': 16384, 'max_window_layers': c.layers, 'model_type': 'qwen3', 'num_attention_heads': c.heads, 'num_hidden_layers': c.layers, 'num_key_value_heads': c.kv,
         'num_target_layers': c.target_layers, 'rms_norm_eps': c.eps, 'sliding_window': c.window or None, 'use_sliding_window': bool(c.window), 'tie_word_embeddings': False, 'use_cache': False, 'vocab_size': c.vocab,
         'layer_types': ['sliding_attention' if c.window else 'full_attention'] * c.layers, 'rope_parameters': {'rope_theta': c.theta, 'rope_type': 'default'}, 'is_causal': c.causal}
    if c.kind == 'dspark':
        d.update(block_size=c.block, mask_token_id=c.mask, target_layer_ids=list(c.taps), num_anchors=64, markov_rank=c.rank, markov_head_type='vanilla', enable_confidence_head=True, confidence_head_with_markov=True)
    else:
        d['dflash_config'] = {'block_size': c.block, 'mask_token_id': c.mask, 'target_layer_ids': list(c.taps)}
        if c.kind == 'dflash2':
            d['dflash_config'].update(conv_group_size=c.group, conv_kernel_size=2, selector_rank=c.rank, selector_top_k=c.top)
    return d


# ---- pieces on rows, so that one compiled graph serves all layers

def rope(x, cos, sin):
    """Halves, not pairs: x [..., heads, hd], cos and sin [..., hd/2]."""
    a, b = x.float().chunk(2, -1)
    c, s = cos[..., None, :], sin[..., None, :]
    return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)


def angles(pos, c):
    inv = c.theta ** (-torch.arange(0, c.hd, 2, device=pos.device).float() / c.hd)
    a = pos.float()[..., None] * inv
    return a.cos(), a.sin()


def kernels(xn, proj, H, group):
    """Row -> its coefficients [..., side, tap, channel group]."""
    return (xn @ M.cast(proj).T).unflatten(-1, (2, 2, H // group))


def conv(z, delta, base, side, group):
    """y[i, c] = sum over taps t of (base[side, t, c] + delta[i, side, t, c // group]) z[i - t, c]; z [N, B, H], zero before the block."""
    one = (base[side, 0] + delta[..., side, 0, :].float().repeat_interleave(group, -1)) * z
    two = (base[side, 1] + delta[..., side, 1, :].float().repeat_interleave(group, -1)) * F.pad(z, (0, 0, 1, 0))[:, :-1]
    return (one + two).to(z.dtype)


def before_attention(x, cos, sin, norm, base, proj, q, k, v, q_norm, k_norm, hd, eps, group):
    """Block rows [N, B, H] -> q, k, v of every head and the coefficients for the other side of the attention."""
    xn = M.rms(x, norm, eps)
    delta = None
    if base is not None:
        delta = kernels(xn, proj, x.shape[-1], group)
        xn = conv(xn, delta, base, 0, group)
    heads = lambda w: (xn @ M.cast(w).T).unflatten(-1, (-1, hd))
    return rope(M.rms(heads(q), q_norm, eps), cos, sin), rope(M.rms(heads(k), k_norm, eps), cos, sin), heads(v), delta


def after_attention(x, att, delta, o, a_base, norm, base, proj, gate, up, down, eps, group):
    y = att @ M.cast(o).T
    x = x + (y if delta is None else conv(y, delta, a_base, 1, group))
    xn = M.rms(x, norm, eps)
    if base is not None:
        delta = kernels(xn, proj, x.shape[-1], group)
        xn = conv(xn, delta, base, 0, group)
    y = (F.silu(xn @ M.cast(gate).T) * (xn @ M.cast(up).T)) @ M.cast(down).T
    return x + (y if base is None else conv(y, delta, base, 1, group))


def context_kv(c, cos, sin, k, v, k_norm, hd, eps):
    heads = lambda w: (c @ M.cast(w).T).unflatten(-1, (-1, hd))
    return rope(M.rms(heads(k), k_norm, eps), cos, sin), heads(v)


# ---- the model

class Norm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))


class Conv(nn.Module):
    """Starts as the identity."""

    def __init__(self, c):
        super().__init__()
        self.base_kernel = nn.Parameter(torch.zeros(2, 2, c.hidden))
        self.base_kernel.data[:, 0] = 1
        self.kernel_projection = linear(c.hidden, 4 * c.hidden // c.group, 0.0)


def linear(a, b, gain=1.0):
    l = nn.Linear(a, b, bias=False)
    nn.init.normal_(l.weight, std=gain * a ** -0.5)
    return l


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        last = (2 * c.layers) ** -0.5
        self.input_layernorm, self.post_attention_layernorm = Norm(c.hidden), Norm(c.hidden)
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        a, m = self.self_attn, self.mlp
        a.q_proj, a.k_proj, a.v_proj, a.o_proj = linear(c.hidden, c.heads * c.hd), linear(c.hidden, c.kv * c.hd), linear(c.hidden, c.kv * c.hd), linear(c.heads * c.hd, c.hidden, last)
        a.q_norm, a.k_norm = Norm(c.hd), Norm(c.hd)
        m.gate_proj, m.up_proj, m.down_proj = linear(c.hidden, c.inner), linear(c.hidden, c.inner), linear(c.inner, c.hidden, last)
        if c.kind == 'dflash2':
            self.attention_conv, self.mlp_conv = Conv(c), Conv(c)


class Drafter(nn.Module):
    def __init__(self, c, compiled=False):
        super().__init__()
        self.c = c
        self.fc, self.hidden_norm, self.norm = linear(len(c.taps) * c.hidden, c.hidden), Norm(c.hidden), Norm(c.hidden)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.layers))
        if c.kind == 'dflash2':
            s = self.candidate_selector = nn.Module()
            s.hidden_projection = linear(c.hidden, c.rank)
            s.predecessor_codebook = nn.Parameter(torch.randn(c.vocab, c.rank) * 0.02)
            s.successor_codebook = nn.Parameter(torch.zeros(c.vocab, c.rank))
        if c.kind == 'dspark':
            m, f = nn.Module(), nn.Module()
            self.markov_head, self.confidence_head = m, f
            m.markov_w1, m.markov_w2 = linear(c.rank, c.vocab), linear(c.rank, c.vocab, 0.0)
            f.proj = nn.Linear(c.hidden + c.rank, 1)
            nn.init.zeros_(f.proj.weight)
            nn.init.zeros_(f.proj.bias)
        wrap = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
        self.f = {f.__name__: wrap(f) for f in (before_attention, after_attention, context_kv, dflash_loss, selector_loss, dspark_loss)}

    def context(self, taps):
        return M.rms(taps @ M.cast(self.fc.weight).T, self.hidden_norm.weight, self.c.eps)

    def rows(self, embed, anchors):
        """anchors [...] -> block inputs [..., B, H] from the target's embedding."""
        ids = torch.cat((anchors[..., None], torch.full(anchors.shape + (self.c.block - 1,), self.c.mask, device=anchors.device)), -1)
        return M.cast(F.embedding(ids, embed) * self.c.embed_scale)

    def forward(self, taps, pos, embed, anchors, at, mask, store=None):
        """R documents with A blocks each.  taps [R, T, K*H] at positions pos [R, T], anchors and their positions at [R, A],
        mask [R, A*B, T + A*B] (visible) -> final-normed block rows [R, A, B, H].  store: a list that gets what a golden file wants."""
        c, f = self.c, self.f
        R, A = anchors.shape
        cx = self.context(taps)
        ccos, csin = angles(pos, c)
        cos, sin = angles((at[..., None] + torch.arange(c.block, device=at.device)).view(R * A, c.block), c)
        x = self.rows(embed, anchors).view(R * A, c.block, c.hidden)
        g, ctx = c.heads // c.kv, []
        for l in self.layers:
            a, m = l.self_attn, l.mlp
            ac, mc = (l.attention_conv, l.mlp_conv) if c.kind == 'dflash2' else (None, None)
            base = lambda k: None if k is None else k.base_kernel
            proj = lambda k: None if k is None else k.kernel_projection.weight
            q, k, v, delta = f['before_attention'](x, cos, sin, l.input_layernorm.weight, base(ac), proj(ac), a.q_proj.weight, a.k_proj.weight, a.v_proj.weight, a.q_norm.weight, a.k_norm.weight, c.hd, c.eps, c.group)
            ck, cv = f['context_kv'](cx, ccos, csin, a.k_proj.weight, a.v_proj.weight, a.k_norm.weight, c.hd, c.eps)
            K = torch.cat((ck, k.reshape(R, -1, c.kv, c.hd)), 1).repeat_interleave(g, 2).transpose(1, 2)
            V = torch.cat((cv, v.reshape(R, -1, c.kv, c.hd)), 1).repeat_interleave(g, 2).transpose(1, 2)
            att = F.scaled_dot_product_attention(q.reshape(R, -1, c.heads, c.hd).transpose(1, 2), K, V, attn_mask=mask[:, None])
            att = att.transpose(1, 2).reshape(R * A, c.block, -1)
            x = f['after_attention'](x, att, delta, a.o_proj.weight, base(ac), l.post_attention_layernorm.weight, base(mc), proj(mc), m.gate_proj.weight, m.up_proj.weight, m.down_proj.weight, c.eps, c.group)
            if store is not None:
                store.append((cx, ck, cv, x))
        return M.rms(x, self.norm.weight, c.eps).view(R, A, c.block, c.hidden)

    def logits(self, h, head):
        u = (h @ M.cast(head).T).float() * self.c.multiplier
        return self.c.softcap * torch.tanh(u / self.c.softcap) if self.c.softcap else u

    @torch.no_grad()
    def propose(self, h, anchors, head):
        """Block rows [N, B, H], anchors [N] -> drafts [N, m] and what they were chosen from.  Greedy."""
        c, out = self.c, dict(drafts=[], top=[], values=[], scores=[], conf=[], stats=[])
        h = h if c.kind == 'dspark' else h[:, 1:]
        prev = anchors
        for k in range(c.drafts):
            u = self.logits(h[:, k], head)
            v, i = u.topk(c.top, -1)
            out['values'].append(v)
            out['top'].append(i)
            out['stats'].append(dvl_features(u, v))
            if c.kind == 'dflash2':
                s = self.candidate_selector
                e = h[:, k].float() @ s.hidden_projection.weight.T
                score = v + torch.einsum('nr,nkr->nk', s.predecessor_codebook[prev] * e, s.successor_codebook[i])
                out['scores'].append(score)
                prev = i.gather(1, score.argmax(-1, keepdim=True))[:, 0]
            elif c.kind == 'dspark':
                w = self.markov_head.markov_w1.weight[prev]
                out['conf'].append(torch.cat((h[:, k].float(), w), -1) @ self.confidence_head.proj.weight[0] + self.confidence_head.proj.bias)
                full = u + w @ self.markov_head.markov_w2.weight.T
                out['scores'].append(full.topk(c.top, -1))
                prev = full.argmax(-1)
            else:
                prev = i[:, 0]
            out['drafts'].append(prev)
        pairs = c.kind == 'dspark'
        return {k: [torch.stack([s[j] for s in v], 1) for j in (0, 1)] if pairs and k == 'scores' else torch.stack(v, 1) for k, v in out.items() if v}


def dvl_features(u, v):
    """18 numbers a slot: the top logit, its distance to ranks 2..16, log-probability of the top token, entropy."""
    lp = u.log_softmax(-1)
    return torch.cat((v[:, :1], v[:, :1] - v[:, 1:], v[:, :1] - u.logsumexp(-1, keepdim=True), -(lp.exp() * lp).sum(-1, keepdim=True)), -1)


def visible(doc, j, c, block_bits):
    """Documents lie in rows of T tokens.  doc [R, T], anchor offsets j [R, A] -> [R, A*B, T + A*B]: context rows of the same document before the
    anchor and inside the window of each block row, and the row's own block."""
    R, T = doc.shape
    A = j.shape[1]
    d = j[..., None] - torch.arange(T, device=doc.device)
    see = (d > 0) & (doc[:, None] == doc.gather(1, j)[..., None])
    see = see[:, :, None].expand(R, A, c.block, T)
    if c.window:
        see = see & (d[:, :, None] + torch.arange(c.block, device=doc.device)[:, None] < c.window)
    return torch.cat((see.reshape(R, A * c.block, T), block_bits.expand(R, -1, -1)), -1)


def block_bits(A, c, device):
    own = torch.ones(c.block, c.block, dtype=torch.bool, device=device)
    return torch.block_diag(*[own.tril() if c.causal else own] * A)[None]


# ---- losses; rows are drafted slots, h and th (the target's last normed hidden state before that position) [n, H]

def cross(logits, t, labels, hard):
    """Cross-entropy to the target's distribution, and where `hard` (answers at temperature 0) half of it to the token itself."""
    lp = logits.log_softmax(-1)
    soft = -(t.softmax(-1) * lp).sum(-1)
    return soft + hard * 0.5 * (-lp.gather(1, labels[:, None])[:, 0] - soft)


def dflash_loss(h, th, labels, w, hard, head):
    logits, t = (h @ M.cast(head).T).float(), (th @ M.cast(head).T).float()
    ce = cross(logits, t, labels, hard)
    with torch.no_grad():
        hit = (logits.argmax(-1) == labels).float()
    return (ce * w).sum() / w.sum().clamp(min=1e-6), hit


def selector_loss(h, prev, labels, w, head, hp, pred, succ, top):
    """Choice among the unary top 16 given the true predecessor; slots whose token is not among them are dropped."""
    u = (h @ M.cast(head).T).float()
    ids = u.detach().topk(top, -1).indices
    e = h.float() @ hp.T
    s = u.gather(1, ids) + torch.einsum('nr,nkr->nk', pred[prev] * e, succ[ids])
    at = ids == labels[:, None]
    w = w * at.any(-1)
    ce = s.logsumexp(-1) - (s * at).sum(-1)
    with torch.no_grad():
        hit = ids.gather(1, s.argmax(-1, keepdim=True))[:, 0] == labels
    return (ce * w).sum() / w.sum().clamp(min=1e-6), hit.float()


def dspark_loss(h, th, prev, labels, w, hard, head, w1, w2, cw, cb, tv):
    """tv 0: cross-entropy alone; 1: 0.1 cross-entropy + 0.9 total difference of the Markov-corrected distribution; and the confidence head's."""
    e = F.embedding(prev, w1)
    logits, t = (h @ M.cast(head).T).float() + (M.cast(e) @ M.cast(w2).T).float(), (th @ M.cast(head).T).float()
    ce = cross(logits, t, labels, hard)
    l1 = (logits.softmax(-1) - t.softmax(-1)).abs().sum(-1)
    z = torch.cat((h.float(), e), -1) @ cw[0] + cb
    bce = F.binary_cross_entropy_with_logits(z, (1 - 0.5 * l1).detach().clamp(0, 1), reduction='none')
    total = ce * (1 - 0.9 * tv) + 0.9 * tv * l1 + bce
    with torch.no_grad():
        hit = (logits.argmax(-1) == labels).float()
    return (total * w).sum() / w.sum().clamp(min=1e-6), hit


# ---- files

def save(net, folder):
    from safetensors.torch import save_file
    os.makedirs(folder, exist_ok=True)
    save_file({k: v.detach().bfloat16().cpu().contiguous() for k, v in net.state_dict().items()}, folder + '/model.safetensors', metadata={'format': 'pt'})
    open(folder + '/config.json', 'w').write(json.dumps(write_config(net.c), indent=1) + '\n')


def load(folder, compiled=False):
    from safetensors.torch import load_file
    net = Drafter(read_config(json.load(open(folder + '/config.json'))), compiled)
    sd = {k: v.float() for k, v in load_file(folder + '/model.safetensors').items() if k not in ('embed_tokens.weight', 'lm_head.weight')}
    net.load_state_dict(sd)
    return net


# ---- comparison with golden values

def fixture(d):
    """Context rows, block states, candidates, scores, chain, confidence and drafts of every recorded round; the largest difference of each.

    The golden file has target features of the prompt only; context rows that later rounds appended are taken from its K and V."""
    from safetensors.torch import load_file
    M.LOW = False
    net, g, t = load(d + '/draft'), load_file(d + '/golden.safetensors'), load_file(d + '/target/model.safetensors')
    c, err = net.c, {}
    embed = t['model.embed_tokens.weight'].float()
    head = t.get('lm_head.weight', embed).float()
    note = lambda k, a, b: err.__setitem__(k, max(err.get(k, 0.0), (a - b).abs().max().item()))
    P, R = len(g['prompt_ids']), len(g['round.accepted'])
    plain = net.f['context_kv']
    with torch.no_grad():
        cx = net.context(g['features'])
        note('ctx', cx, g['ctx'])
        cos, sin = angles(torch.arange(P), c)
        for i, l in enumerate(net.layers):
            k, v = context_kv(cx, cos, sin, l.self_attn.k_proj.weight, l.self_attn.v_proj.weight, l.self_attn.k_norm.weight, c.hd, c.eps)
            note('ctx_k', k, g['ctx_k.%d' % i][:P])
            note('ctx_v', v, g['ctx_v.%d' % i][:P])
        for r in range(R):
            n, anchor = int(g['round.anchor_pos'][r]), g['round.anchor_id'][r:r + 1].long()
            taps, layer = torch.zeros(1, n, len(c.taps) * c.hidden), iter(range(c.layers))
            taps[0, :P] = g['features'][:n]
            if r:                                   # K and V as recorded
                net.f['context_kv'] = lambda *a: (lambda i: (g['ctx_k.%d' % i][None, :n], g['ctx_v.%d' % i][None, :n]))(next(layer))
            store = []
            mask = visible(torch.zeros(1, n + 1, dtype=torch.long), torch.tensor([[n]]), c, block_bits(1, c, 'cpu'))
            mask = torch.cat((mask[..., :n], mask[..., n + 1:]), -1)
            h = net(taps, torch.arange(n)[None], embed, anchor[None], torch.tensor([[n]]), mask, store)[0, 0]
            net.f['context_kv'] = plain
            note('hidden', h, g['block.hidden'][r])
            for i in range(c.layers if r == 0 else 0):
                note('layer_out', store[i][3][0], g['block.layer_out.%d' % i])
            p = net.propose(h[None], anchor, head)
            note('unary', p['values'][0], g['unary.values'][r])
            if c.kind == 'dflash2':
                by = lambda ids, s: s.gather(1, ids.argsort(-1))
                note('selector', by(p['top'][0], p['scores'][0]), by(g['unary.ids'][r].long(), g['sel.scores'][r]))
            if c.kind == 'dspark':
                note('chain', p['scores'][0][0], g['chain.values'][r])
                note('confidence', p['conf'][0], g['conf.logit'][r])
            assert p['drafts'][0].tolist() == g['round.proposed'][r].tolist(), (d, r)
            ids, a = g['round.target_ids'][r].tolist(), 0
            while a < c.drafts and p['drafts'][0, a] == ids[a]:
                a += 1
            assert a == g['round.accepted'][r] and ids[a] == g['round.successor'][r]
    print('%-24s %d rounds, drafts and counts equal; %s' % (os.path.basename(d), R, ', '.join('%s %.0e' % e for e in err.items())))
    assert all(v < 2e-3 for v in err.values()), err


if __name__ == '__main__':
    assert sys.argv[1] == '--fixtures'
    for d in sys.argv[2:]:
        fixture(d.rstrip('/'))
