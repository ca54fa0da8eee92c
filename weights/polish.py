#!/usr/bin/env python3
"""The last, small step of training: unlearn loops.  Runs on a CPU in a quarter of an hour.

    python3 polish.py DIR_IN DIR_OUT [--steps 70] [--minutes 18] [--blend 0.6]
    python3 polish.py --loops DIR [--n 60]          only measure: share of sampled continuations that loop

A small model that has learned to copy very well also copies itself: left alone with open prose it falls into "the river is full of
the river".  So it writes continuations of training text, and every token that completes a repeated run of five is made less likely
(unlikelihood, Welleck et al. 2019), while ordinary text and dialogues beside it hold everything else in place.  Only the upper four
layers move; embeddings, indexers and the lower layers stay as they are.  At full strength this overshoots: no loops, but invented
words, and copying falls to 97%.  The weights written are therefore a mean of before and after, --blend being the share of after.
Tried, answers of 100 that loop: 0.4 five, 0.6 none (and copying back at 99.7%).
"""
import argparse, glob, json, os, random, sys, time
import numpy as np
import torch
import torch.nn.functional as F
import model as M
import train
from evaluate import loop

M.LOW = False
torch.set_num_threads(int(os.environ.get('THREADS', '1')))
torch.set_flush_denormal(True)


def moe_routed(x, att, o, norm, router, bias, gate_up, down, scale):
    """model.after_attention_moe with rows sorted by expert: a third of the arithmetic, which is what counts on a CPU."""
    x = x + att @ o.T
    xn = M.rms(x, norm, 1e-5)
    s = torch.sigmoid(xn @ router.T)
    top = (s.detach() + bias).topk(2, -1).indices
    w = s.gather(1, top)
    w = w / (w.sum(-1, keepdim=True) + 1e-20) * scale
    E = gate_up.shape[0] - 1
    g, u = F.linear(xn, gate_up[E, 0]), F.linear(xn, gate_up[E, 1])
    y = x + (F.silu(g) * u) @ down[E]
    for e in range(E):
        row, k = (top == e).nonzero(as_tuple=True)
        if len(row):
            h = xn[row]
            y = y.index_add(0, row, ((F.silu(F.linear(h, gate_up[e, 0])) * F.linear(h, gate_up[e, 1])) @ down[e]) * w[row, k, None])
    return y, s.new_zeros(E)


def ready(net):
    net.f['after_attention_moe'] = moe_routed
    return net


@torch.no_grad()
def sample(net, prompts, n, temperature=0.7, top_p=0.95, seed=1, stops=()):
    """Prompts (lists of ids, all of one length) -> n sampled tokens each, sparse selection on, with a KV cache."""
    c, B, L = net.c, len(prompts), len(prompts[0])
    g = torch.Generator().manual_seed(seed)
    cos, sin = net.angles(1, L + n, torch.device('cpu'))
    K = [torch.zeros(B, c.heads, L + n, c.nope + c.rope) for _ in net.blocks]
    V = [torch.zeros(B, c.heads, L + n, c.v) for _ in net.blocks]
    KI = {i: torch.zeros(B, L + n, c.index_dim) for i in c.full}
    ids, out, done = torch.tensor(prompts), [], torch.zeros(B, dtype=torch.bool)
    at = 0
    while at < L + n - 1:
        S = ids.shape[1]
        cs, sn = cos[at:at + S].repeat(B, 1), sin[at:at + S].repeat(B, 1)
        x = F.embedding(ids.reshape(-1), net.embed)
        end = at + S
        causal = torch.arange(end) <= torch.arange(at, end)[:, None]
        for b in net.blocks:
            xn, qr, q, k, v = net.f['before_attention'](x, cs, sn, b.norm, b.q_a, b.q_norm, b.q_b, b.kv_a, b.kv_norm, b.kv_b, c.heads, c.nope, c.rope, c.v)
            K[b.i][:, :, at:end] = k.view(B, S, c.heads, -1).transpose(1, 2)
            V[b.i][:, :, at:end] = v.view(B, S, c.heads, -1).transpose(1, 2)
            if b.full and end > c.topk:
                KI[b.i][:, at:end] = M.index_k(xn, cs, sn, b.wk, b.kn_w, b.kn_b, c.rope).view(B, S, -1)
                qi, w = M.index_q(qr, xn, cs, sn, b.wq_b, b.w_proj, c.index_heads, c.index_dim, c.rope)
                s = torch.relu(torch.einsum('bshd,btd->bhst', qi.view(B, S, c.index_heads, -1), KI[b.i][:, :end]) * c.index_dim ** -0.5)
                s = (s * w.view(B, S, -1).transpose(1, 2)[..., None]).sum(1).masked_fill(~causal, -1e30)
                mask = torch.zeros(B, S, end, dtype=torch.bool).scatter(2, s.topk(c.topk, -1).indices, True) & causal
            elif b.full:
                KI[b.i][:, at:end] = M.index_k(xn, cs, sn, b.wk, b.kn_w, b.kn_b, c.rope).view(B, S, -1)
                mask = causal[None].expand(B, -1, -1)
            att = F.scaled_dot_product_attention(q.view(B, S, c.heads, -1).transpose(1, 2), K[b.i][:, :, :end], V[b.i][:, :, :end], attn_mask=mask[:, None])
            att = att.transpose(1, 2).reshape(B * S, -1)
            if b.moe:
                x, _ = net.f['after_attention_moe'](x, att, b.o, b.post_norm, b.router, b.bias, b.gate_up, b.down, c.route_scale)
            else:
                x = net.f['after_attention_dense'](x, att, b.o, b.post_norm, b.gate_up, b.down)
        at = end
        p = (net.logits(x.view(B, S, -1)[:, -1]) / temperature).softmax(-1)
        v, i = p.sort(-1, descending=True)
        v[v.cumsum(-1) - v > top_p] = 0
        ids = i.gather(1, torch.multinomial(v, 1, generator=g))
        done |= torch.isin(ids[:, 0], torch.tensor(list(stops) or [-1]))
        out.append(ids[:, 0])
        if stops and done.all():
            break
    return torch.stack(out, 1).tolist()


def repeated(ids, start, n=5):
    """Positions from `start` on whose token completes a run of n that came before."""
    seen, bad = set(), []
    for i in range(n - 1, len(ids)):
        k = tuple(ids[i - n + 1:i + 1])
        if k in seen and i >= start:
            bad.append(i)
        seen.add(k)
    return bad


def prefixes(rows, n, length, r):
    """Beginnings of text, with the prefix that plain text gets."""
    out = []
    while len(out) < n:
        name, i = r.choice(rows.flat)
        a, m = rows.pieces[name][i]
        if m > 100:
            at = a + r.randrange(0, m - 60)
            while at < a + m - 40 and not rows.stop[rows.ids[at - 1]]:
                at += 1
            out.append(rows.begin + rows.ids[at:at + length].tolist())
    return [p for p in out if len(p) == length + 2]


def measure(net, ids, meta, n, log, tokens=240):
    held = train.Rows(99, ids, meta, 'held', heldout=True)
    r, bad = random.Random(3), 0
    for b in range(0, n, 30):
        ps = prefixes(held, min(30, n - b), 12, r)
        got = sample(net, ps, tokens, seed=100 + b)
        hits = [g for g in got if loop(g)]
        bad += len(hits)
        if b == 0:
            for p, g in list(zip(ps, got))[:3]:
                log('   %r -> %r' % (held.tok.decode(p), held.tok.decode(g)[:300]))
    log('open text, temperature 0.7, top-p 0.95, %d tokens: %d of %d loop' % (tokens, bad, n))
    return bad / n


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument('dirs', nargs='*')
    ap.add_argument('--loops', action='store_true')
    ap.add_argument('--n', type=int, default=60)
    ap.add_argument('--steps', type=int, default=70)
    ap.add_argument('--minutes', type=float, default=18)
    ap.add_argument('--blend', type=float, default=0.6)
    ap.add_argument('--lr', type=float, default=2e-4)
    args = ap.parse_args()
    t0 = time.time()
    log = lambda s: print('%6.0f %s' % (time.time() - t0, s), flush=True)
    ids, meta = train.load_corpus()
    net = ready(M.Mini())
    train.load_weights(net, args.dirs[0])
    if args.loops:
        measure(net, ids, meta, args.n, log)
        return
    before = {k: v.clone() for k, v in net.state_dict().items()}
    torch.manual_seed(2)
    train.SHORT = 320
    rows = train.Rows(555, ids, meta)
    r = random.Random(8)
    for p in net.parameters():
        p.requires_grad_(False)
    chosen = [p for b in net.blocks[4:] for n, p in b.named_parameters() if not any(p is q for q in b.indexer_parameters()) and n != 'router']
    for p in chosen:
        p.requires_grad_(True)
    opt = torch.optim.Adam(chosen, lr=args.lr, betas=(0.9, 0.98))
    pool = []
    os.makedirs(args.dirs[1], exist_ok=True)
    for step in range(args.steps):
        if time.time() - t0 > args.minutes * 60:
            break
        if step % 14 == 0:                          # its own continuations, the looping ones first
            ps = prefixes(rows, 48, r.choice((8, 16, 24)), r)
            got = sample(net, ps, 150, seed=1000 + step)
            new = [(p + g, len(p)) for p, g in zip(ps, got)]
            log('step %d: %d of %d own continuations loop' % (step, sum(loop(g) for g in got), len(got)))
            new.sort(key=lambda s: -len(repeated(s[0], s[1])))
            pool = new[:36]
        r.shuffle(pool)
        batch, T = pool[:8], max(len(s) for s, _ in pool[:8])
        a = torch.zeros(8, T, dtype=torch.long)
        bad = torch.zeros(8, T, dtype=torch.bool)
        for j, (s, start) in enumerate(batch):
            a[j, :len(s)] = torch.tensor(s)
            bad[j, repeated(s, start)] = True
        frac = (step + 1) / args.steps
        for g in opt.param_groups:
            g['lr'] = args.lr * min(1.0, (step + 1) / 8) * min(1.0, (1 - frac) / 0.4 + 0.02)
        ul = torch.zeros(())
        if bad.any():
            x, _, _ = net(a)
            x = x.view(8, T, -1)[:, :-1][bad[:, 1:]]
            lp = net.logits(x).log_softmax(-1).gather(1, a[:, 1:][bad[:, 1:]][:, None])[:, 0]
            ul = -torch.log1p(-lp.exp().clamp(max=0.9999)).mean()
            ul.backward()
        x, w = zip(*[rows.row('A') for _ in range(4)])
        x, w = torch.tensor(np.stack(x).astype(np.int64)), torch.tensor(np.stack(w))
        h, _, _ = net(x[:, :-1].contiguous())
        use = w[:, 1:].reshape(-1) > 0
        ce = F.cross_entropy(net.logits(h[use]), x[:, 1:].reshape(-1)[use], reduction='none')
        lm = (ce * w[:, 1:].reshape(-1)[use]).sum() / w[:, 1:].sum()
        lm.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        if step % 3 == 0:
            log('step %d: unlikelihood %.3f on %d tokens, lm %.3f' % (step, ul.item(), int(bad.sum()), lm.item()))
    with torch.no_grad():
        for k, v in net.state_dict().items():
            v.copy_((1 - args.blend) * before[k] + args.blend * v)
    train.save_weights(net, args.dirs[1])
    log('saved, %.2f of the way' % args.blend)


if __name__ == '__main__':
    main()
