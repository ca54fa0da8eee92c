#!/usr/bin/env python3
"""The last, small step of training: unlearn loops.  Runs on a CPU in a quarter of an hour, for mini-v41 on a GPU in two minutes.

    python3 polish.py DIR_IN DIR_OUT [--v41] [--steps 70] [--minutes 18] [--blend 0.6]
    python3 polish.py --loops DIR [--v41] [--n 60]  only measure: share of sampled continuations that loop

A small model that has learned to copy very well also copies itself: left alone with open prose it falls into "the river is full of
the river".  So it writes continuations of training text, and every token that completes a repeated run of five is made less likely
(unlikelihood, Welleck et al. 2019), while ordinary text and dialogues beside it hold everything else in place.  Only the upper four
layers move; embeddings, indexers and the lower layers stay as they are.  At full strength this overshoots: no loops, but invented
words, and copying falls to 97%.  The weights written are therefore a mean of before and after, --blend being the share of after.
Tried with mini, answers of 100 that loop: 0.4 five, 0.6 none (and copying back at 99.7%).
"""
import argparse, contextlib, multiprocessing as mp, os, random, time
import numpy as np
import torch
import torch.nn.functional as F
import model as M
import model_v41 as V
import train
from evaluate import loop


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


class ReaderGLM:
    """A few positions at a time over kept keys and values, with the sparse selection."""

    def __init__(self, net, B, total):
        c = net.c
        self.net, (self.cos, self.sin) = net, net.angles(1, total, torch.device('cpu'))
        self.k = [torch.zeros(B, c.heads, total, c.nope + c.rope) for _ in net.blocks]
        self.v = [torch.zeros(B, c.heads, total, c.v) for _ in net.blocks]
        self.index_k = {i: torch.zeros(B, total, c.index_dim) for i in c.full}

    def read(self, ids, at):
        """ids [B, S] of the positions from `at` on -> the last row's logits."""
        net, c, (B, S) = self.net, self.net.c, ids.shape
        end = at + S
        cos, sin = self.cos[at:end].repeat(B, 1), self.sin[at:end].repeat(B, 1)
        x = F.embedding(ids.reshape(-1), net.embed)
        causal = torch.arange(end) <= torch.arange(at, end)[:, None]
        for b in net.blocks:
            xn, qr, q, k, v = net.f['before_attention'](x, cos, sin, b.norm, b.q_a, b.q_norm, b.q_b, b.kv_a, b.kv_norm, b.kv_b, c.heads, c.nope, c.rope, c.v)
            self.k[b.i][:, :, at:end] = k.view(B, S, c.heads, -1).transpose(1, 2)
            self.v[b.i][:, :, at:end] = v.view(B, S, c.heads, -1).transpose(1, 2)
            if b.full:
                keys = self.index_k[b.i]
                keys[:, at:end] = M.index_k(xn, cos, sin, b.wk, b.kn_w, b.kn_b, c.rope).view(B, S, -1)
                mask = causal[None].expand(B, -1, -1)
            if b.full and end > c.topk:
                qi, w = M.index_q(qr, xn, cos, sin, b.wq_b, b.w_proj, c.index_heads, c.index_dim, c.rope)
                s = torch.relu(torch.einsum('bshd,btd->bhst', qi.view(B, S, c.index_heads, -1), keys[:, :end]) * c.index_dim ** -0.5)
                s = (s * w.view(B, S, -1).transpose(1, 2)[..., None]).sum(1).masked_fill(~causal, -1e30)
                mask = torch.zeros(B, S, end, dtype=torch.bool).scatter(2, s.topk(c.topk, -1).indices, True) & causal
            att = F.scaled_dot_product_attention(q.view(B, S, c.heads, -1).transpose(1, 2), self.k[b.i][:, :, :end], self.v[b.i][:, :, :end], attn_mask=mask[:, None])
            att = att.transpose(1, 2).reshape(B * S, -1)
            if b.moe:
                x, _ = net.f['after_attention_moe'](x, att, b.o, b.post_norm, b.router, b.bias, b.gate_up, b.down, c.route_scale)
            else:
                x = net.f['after_attention_dense'](x, att, b.o, b.post_norm, b.gate_up, b.down)
        return net.logits(x.view(B, S, -1)[:, -1])


class ReaderV41:
    """The same of model_v41: kept are the positions' own rows, the compressed ones with their index keys, and what these are made of."""

    def __init__(self, net, B, total):
        c, dev = net.c, net.embed.device
        new = lambda d: torch.zeros(B, total, d, device=dev, dtype=torch.bfloat16 if M.LOW else torch.float32)
        self.net, self.ids, self.angles = net, torch.zeros(B, total, dtype=torch.long, device=dev), {wide: net.angles(1, total, dev, wide) for wide in (False, True)}
        self.near = [new(c.head_dim) for _ in net.blocks]
        self.parts, self.far, self.keys = ({i: new(d) for i in c.sources} for d in (c.hidden, c.head_dim, c.index_dim))

    def read(self, ids, at):
        net, c, (B, S), f = self.net, self.net.c, ids.shape, V.PIECES
        end, dev = at + S, ids.device
        self.ids[:, at:end] = ids
        h = M.cast(F.embedding(ids.reshape(-1), net.embed))[:, None].expand(-1, c.streams, -1).contiguous()
        carry = torch.zeros(B * S, c.streams, device=dev)
        carry[:, 0] = 1
        first = max(0, at - c.window + 1)
        back = torch.arange(at, end, device=dev)[:, None] - torch.arange(first, end, device=dev)
        window = ((back >= 0) & (back < c.window)).expand(B, -1, -1)
        for b in net.blocks:
            if b.engram:
                before = max(0, at - c.engram_order + 1)
                rows = net.engram_rows(self.ids[:, before:end], b.i).view(B, end - before, -1)[:, at - before:].flatten(0, 1)
                h = f['memory'](h, F.embedding(rows, M.cast(b.table)).flatten(1), b.e_wkv.flatten(0, 1), b.e_q, b.e_k)
            cos, sin = self.turn(b, B, at, end)
            xn, qr, q, kv, pre, post, comb = b.before(f, c, h, carry, cos, sin)
            self.near[b.i][:, at:end] = kv.view(B, S, -1)
            keep, see = self.near[b.i][:, first:end], window
            if b.source:
                source = b.i
                self.compress(b, xn.view(B, S, -1), at, end)
            if b.selects:
                qi, w = V.index_q(b, c, qr, xn, cos, sin)
                pick = torch.zeros(B, S, end // b.ratio, dtype=torch.bool, device=dev)
                net.select_plain(b, qi.view(B, S, c.index_heads, -1), w.view(B, S, -1), self.keys[source][:, :end // b.ratio], pick, net.inside if b.i > c.candidate_layer else None, at)
            if b.ratio:
                keep, see = torch.cat((keep, self.far[source][:, :end // b.ratio]), 1), torch.cat((window, pick), -1)
            att, lse = V.attend_seen(q.view(B, S, c.heads, -1).transpose(1, 2), keep, see)
            h, carry, _ = b.after(f, c, h, att.reshape(B * S, c.heads, -1), lse.reshape(B * S, c.heads), cos, sin, pre, post, comb, c.top)
        return net.logits(V.collapse(h, carry).view(B, S, -1)[:, -1])

    def turn(self, b, B, at, end):
        return [a[at:end].repeat(B, 1) for a in self.angles[b.ratio > 0]]

    def compress(self, b, xn, at, end):
        """Rows whose last position is now there."""
        B, R = len(xn), b.ratio
        self.parts[b.i][:, at:end] = xn
        at, end = at // R * R, end // R * R
        if end > at:
            far, keys = self.net.compress(b, self.parts[b.i][:, at:end].flatten(0, 1), B, end - at, *self.turn(b, B, at, end))
            self.far[b.i][:, at // R:end // R], self.keys[b.i][:, at // R:end // R] = far[:, :(end - at) // R], keys


@torch.no_grad()
def sample(net, prompts, n, temperature=0.7, top_p=0.95, seed=1):
    """Prompts (lists of ids) -> what is sampled behind each, n tokens behind the longest.  A temperature for all, or one for each."""
    B, dev, known = len(prompts), net.embed.device, [len(p) for p in prompts]
    start, total = min(known), max(known) + n
    rows = torch.tensor([p + [-1] * (total - len(p)) for p in prompts], device=dev)
    temperature = torch.as_tensor(temperature, device=dev).expand(B)[:, None]
    g = torch.Generator(device=dev).manual_seed(seed)
    reader, at = (ReaderV41 if isinstance(net, V.Mini) else ReaderGLM)(net, B, total), 0
    for end in range(start, total):
        p = (reader.read(rows[:, at:end], at) / temperature).softmax(-1)
        v, i = p.sort(-1, descending=True)
        v[v.cumsum(-1) - v > top_p] = 0
        new = i.gather(1, torch.multinomial(v, 1, generator=g))[:, 0]
        rows[:, end] = torch.where(rows[:, end] < 0, new, rows[:, end])
        at = end
    return [r[k:] for r, k in zip(rows.tolist(), known)]


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
    return out


def questions(rows, n, kind=None, most=96):
    """Dialogues up to where the answer begins."""
    out = []
    while len(out) < n:
        out += [ids[:next(i for i, w in enumerate(weights) if w)] for ids, weights in rows.encode([rows.tasks.dialogue(kind) for _ in range(n)])]
        out = [ids for ids in out if len(ids) <= most]
    return out[:n]


def continuations(net, rows, prompts, n, seed):
    """Pairs of a prompt and what the model says behind it until it ends its text."""
    return [(p, g[:g.index(rows.text_end)] if rows.text_end in g else g) for p, g in zip(prompts, sample(net, prompts, n, seed=seed))]


def measure(net, held, n, batch, log, tokens=300):
    r = random.Random(3)
    got = [s for b in range(0, n, batch) for s in continuations(net, held, prefixes(held, min(batch, n - b), 12, r), tokens, 100 + b)]
    for p, g in got[:3]:
        log('   %r -> %r' % (held.tok.decode(p), held.tok.decode(g)[:300]))
    bad = sum(loop(g) for _, g in got)
    log('open text, temperature 0.7, top-p 0.95, %d tokens: %d of %d loop' % (tokens, bad, n))
    return bad / n


def measure_rest(net, held, n, log):
    """What is not to suffer."""
    sparse, size, good = isinstance(net, V.Mini), train.B_SHORT, {}
    for kind in ('sums', 'copying'):
        docs = held.encode([held.tasks.dialogue(kind) for _ in range(n)])
        good[kind] = sum(train.exact(net, torch, held, docs, train.SHORT, sparse, size))
    held.order = sorted(held.flat, reverse=True)[::7]
    texts = np.array([held.text(train.SHORT + 1) for _ in range(size)])
    log('of %d: %s; held-out text %.3f' % (n, good, train.perplexity(net, torch, texts, sparse, size)))


class Ordinary:
    """n rows of text and dialogues, made by other processes where there are many processors."""

    def __init__(self, ids, meta, n, processes):
        Ordinary.rows = train.Rows(555, ids, meta)
        self.made = map(Ordinary.row, range(n))
        if processes > 1:
            os.environ['TOKENIZERS_PARALLELISM'] = 'false'
            self.pool = mp.Pool(processes, Ordinary.seed, (mp.Value('i', 555),))
            self.made = self.pool.imap(Ordinary.row, range(n), chunksize=11)

    @staticmethod
    def seed(last):
        with last.get_lock():
            last.value += 1
            Ordinary.rows.r.seed(last.value)

    @staticmethod
    def row(_):
        return Ordinary.rows.row('A')

    def batch(self, n, device):
        x, w = zip(*[next(self.made) for _ in range(n)])
        return torch.tensor(np.stack(x).astype(np.int64), device=device), torch.tensor(np.stack(w), device=device)


def loosen(net):
    """Weights as saved are what the file stores.  Each goes somewhere into the cell that is rounded to it, or small steps would come to nothing."""
    g = torch.Generator(device=net.embed.device).manual_seed(4)
    for kind, t in net.stored():
        x = V.groups(kind, t.detach())
        v, e = V.quantise(kind, x)
        step = torch.where(v.abs() < 2, 0.5, torch.where(v.abs() < 4, 1.0, 2.0)) if kind == 4 else torch.exp2(torch.frexp(v.abs().clamp(min=2.0 ** -6))[1] - 4.0)
        y = x + torch.exp2(e) * step * (torch.rand(x.shape, generator=g, device=x.device) - 0.5)
        w, f = V.quantise(kind, y)
        y = torch.where(w * torch.exp2(f) == x, y, x)
        with torch.no_grad():
            t.copy_(V.ungroup(kind, y, t.shape))


def open_model(folder, v41, gpu):
    """The model, and what puts its weights to the values that the file stores while they are used."""
    if v41:
        import export_v41
        net = export_v41.fresh(compiled=gpu)
    else:
        net = ready(M.Mini())
    train.load_weights(net, folder)
    net.to('cuda' if gpu else 'cpu')
    if v41:
        loosen(net)
    rounding = V.Rounding(net.stored(), net.parameters()) if v41 else None

    @contextlib.contextmanager
    def rounded():
        if rounding:
            rounding.enter()
        yield
        if rounding:
            rounding.leave()
    return net, rounded


def unlikelihood(net, batch, length, sparse):
    """Samples (ids, where its own part starts) -> the loss on tokens that repeat, and how many these are."""
    a = torch.zeros(len(batch), length, dtype=torch.long)
    bad = torch.zeros(len(batch), length, dtype=torch.bool)
    for j, (ids, start) in enumerate(batch):
        a[j, :len(ids)] = torch.tensor(ids)
        bad[j, repeated(ids, start)] = True
    a, bad = a.to(net.embed.device), bad.to(net.embed.device)
    x, _, _ = net(a, sparse=sparse)
    x = x.view(len(batch), length, -1)[:, :-1][bad[:, 1:]]
    lp = net.logits(x).log_softmax(-1).gather(1, a[:, 1:][bad[:, 1:]][:, None])[:, 0]
    return -torch.log1p(-lp.exp().clamp(max=0.9999)).sum() / max(1, len(lp)), len(lp)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument('dirs', nargs='*')
    ap.add_argument('--v41', action='store_true', help='weights/mini-v41')
    ap.add_argument('--loops', action='store_true')
    ap.add_argument('--n', type=int, default=60)
    ap.add_argument('--steps', type=int, default=70)
    ap.add_argument('--minutes', type=float, default=18)
    ap.add_argument('--blend', type=float, nargs='+', default=[0.6], help='tried one after the other until at most --most of the continuations loop')
    ap.add_argument('--most', type=float, default=0.01)
    ap.add_argument('--lr', type=float, default=2e-4)
    args = ap.parse_args()
    t0 = time.time()
    log = lambda s: print('%6.0f %s' % (time.time() - t0, s), flush=True)
    gpu = args.v41 and torch.cuda.is_available()
    torch.set_num_threads(int(os.environ.get('THREADS', '1')))
    torch.set_flush_denormal(True)
    M.LOW, train.CHAT = gpu, train.DeepSeek if args.v41 else train.GLM
    ids, meta = train.load_corpus()
    if gpu:
        torch.set_float32_matmul_precision('high')
        torch._dynamo.config.cache_size_limit = 64
    else:
        train.SHORT, train.B_SHORT = 320, 4
    samples, few, length = (1024, 192, 352) if gpu else (48, 8, 178)           # 192 x 352 = 66 x 1,024: the compiled pieces see the same rows
    ordinary = Ordinary(ids, meta, args.steps * train.B_SHORT, 14 if gpu else 1)
    held, rows, r = train.Rows(99, ids, meta, 'held', heldout=True), ordinary.rows, random.Random(8)
    net, rounded = open_model(args.dirs[0], args.v41, gpu)
    with rounded():
        measure(net, held, args.n, samples, log)
        if args.loops:
            return
        measure_rest(net, held, 132 if gpu else 24, log)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    torch.manual_seed(2)
    chosen = [p for b in net.blocks[4:] for n, p in b.named_parameters() if not any(p is q for q in b.indexer_parameters()) and n != 'router']
    if not gpu:                                     # compiled pieces stay those of training
        for p in net.parameters():
            p.requires_grad_(any(p is q for q in chosen))
    opt = torch.optim.Adam(chosen, lr=args.lr, betas=(0.9, 0.98))
    os.makedirs(args.dirs[1], exist_ok=True)
    for step in range(args.steps):
        if time.time() - t0 > args.minutes * 60:
            break
        if step % 14 == 0:                          # its own continuations, the looping ones first
            ps = prefixes(rows, samples * 7 // 8, r.choice((8, 16, 24)), r) + questions(rows, samples // 8, 'prose', 48)
            with rounded():
                got = continuations(net, rows, ps, length - max(map(len, ps)), 1000 + step)
            log('step %d: %d of %d own continuations loop' % (step, sum(loop(g) for _, g in got), len(got)))
            pool = sorted([(p + g, len(p)) for p, g in got], key=lambda s: -len(repeated(*s)))[:samples * 3 // 4]
        frac = (step + 1) / args.steps
        for g in opt.param_groups:
            g['lr'] = args.lr * min(1.0, (step + 1) / 8) * min(1.0, (1 - frac) / 0.4 + 0.02)
        with rounded():
            ul, bad = unlikelihood(net, r.sample(pool, few), length, args.v41)
            ul.backward()
            x, w = ordinary.batch(train.B_SHORT, net.embed.device)
            y, _, _ = net(x[:, :-1].contiguous(), sparse=args.v41)
            lm = net.loss(y, x[:, 1:].reshape(-1), w[:, 1:].reshape(-1))
            lm.backward()
        opt.step()
        net.zero_grad(set_to_none=True)
        if step % 3 == 0:
            log('step %d: unlikelihood %.3f on %d tokens, lm %.3f' % (step, ul.item(), bad, lm.item()))
    after = {k: v.clone() for k, v in net.state_dict().items()}
    for blend in args.blend:
        with torch.no_grad():
            for k, v in net.state_dict().items():
                v.copy_((1 - blend) * before[k] + blend * after[k])
        log('%.2f of the way' % blend)
        with rounded():
            looping = measure(net, held, args.n, samples, log)
            measure_rest(net, held, 132 if gpu else 24, log)
        if looping <= args.most:
            break
    train.save_weights(net, args.dirs[1])


if __name__ == '__main__':
    main()
