#!/usr/bin/env python3
"""Trains the drafters of weights/mini, and the predictor of accepted lengths (DVL).

    python3 train_drafters.py prompts                          prompts of all kinds -> build/draft/prompts.npz (needs corpus.xz, facts.json)
    python3 train_drafters.py heldout                          40 held-out prompts of each reported kind -> heldout.jsonl, for `tide bench`
    python3 train_drafters.py answers                          on the GPU: the target answers -> DATA/answers.npz
    python3 train_drafters.py train SPEC ... [--out DIR]       one run after the other; SPEC is dflash2,layers=3,seconds=295,... or dspark,...
    python3 train_drafters.py dvl DRAFTER_DIR OUT_DIR          fits the predictor on full-width rounds (train does it too, with --dvl NAME)
    python3 train_drafters.py report DRAFTER_DIR [DVL_DIR]     rounds on the held-out prompts, kind by kind; on a CPU in some minutes
    python3 train_drafters.py golden DIR                       small files for the tests of the C code: a few rounds with the target in the loop

DATA is the folder of answers (--data, build/draft).  The target is weights/mini as exported, frozen, with its sparse selection; its features are
taken by hidden_taps in model.py's forward, once per start of the program, and stay on the GPU.  A hash of a prompt's ids says what it is for: one in
12 is held out for evaluation, one in 12 for the predictor, the others train; plain text comes from held-out pieces in the first two cases.

The answers of the target at temperature 0 are its greedy stream, which greedy speculation reproduces; so a round of block decoding on a held-out
prompt is the drafter's block at the current anchor, compared with that stream, and rounds can be counted without running the target again.
`golden` does the same with the target in the loop, in F32.  A run saves itself every minute (--checkpoints) and is taken up from there.
"""
import argparse, hashlib, json, math, os, random, time
import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
BUILD = os.environ.get('TIDE_BUILD', os.path.join(HERE, 'build'))
TRAIN, HELD, DVL = 0, 1, 2
TAPS = '2-4-6'
STOPS = ('<|endoftext|>', '<|user|>', '<|observation|>')
SHORT_TASKS = ('addition', 'sums', 'copying', 'reversing', 'sorting', 'lookups', 'small')
REPORTED = ('stories', 'tasks', 'definitions', 'prose', 'tech')                 # the kinds whose mean is the bar; `open`, `other` are shown beside them


def part_of(ids):
    h = int.from_bytes(hashlib.blake2b(np.asarray(ids, dtype=np.uint16).tobytes(), digest_size=8).digest(), 'little') % 12
    return HELD if h == 5 else DVL if h == 7 else TRAIN


# ---- prompts

def render(d, last):
    """A dialogue up to one of its questions, as the chat template writes it."""
    turns = d['turns']
    j = len(turns) - 1 if last else 0
    s = '[gMASK]<sop>' + ('<|system|>' + d['system'] if d['system'] else '')
    for q, t, a, _ in turns[:j]:
        s += '<|user|>%s<|assistant|></think>%s' % (q, a)
    q, t, a, _ = turns[j]
    return s + '<|user|>' + q + '<|assistant|>' + ('<think>' if t else '</think>')


def kind_of(name):
    return 'tasks' if name in SHORT_TASKS else 'open' if name == 'prose' else name if name in ('stories', 'definitions') else 'other'


def prompts():
    from tokenizers import Tokenizer
    import tasks, train
    ids, meta = train.load_corpus()
    facts = json.load(open(BUILD + '/facts.json'))
    tok = Tokenizer.from_file(HERE + '/mini/tokenizer.json')
    prefix = [tok.token_to_id('[gMASK]'), tok.token_to_id('<sop>')]
    out, seen = [], set()                           # (ids, kind, part, temperature, new tokens)

    def chats(counts, seed, part, heldout):
        r = random.Random(seed)
        g = tasks.Tasks(r, facts, heldout)
        for name, n in counts:
            have, tries = 0, 0
            while have < n and tries < max(12 * n, 15000):
                some = [g.dialogue(name) for _ in range(256)]
                tries += 256
                for d, e in zip(some, tok.encode_batch_fast([render(d, part == TRAIN and r.random() < 0.5) for d in some], add_special_tokens=False)):
                    if have >= n or len(e.ids) > 500:
                        continue
                    temp = 0 if part != TRAIN else have % 2
                    key = (tuple(e.ids), temp)
                    if part_of(e.ids) == part and (temp or key not in seen):
                        seen.add(key)
                        out.append((e.ids, kind_of(d['kind']), part, temp, 256))
                        have += 1
            print('%-12s part %d: %d of %d' % (name, part, have, n), flush=True)

    def texts(n, seed, part, lengths, limit):
        r, have = random.Random(seed), {'prose': 0, 'tech': 0}
        tag = 'train' if part == TRAIN else 'held'
        pieces = {'prose': [], 'tech': []}
        for name, m in meta.items():
            at = m[tag]['start']
            mine = []
            for x, k in enumerate(m[tag]['lens']):
                if k > lengths[1] + 20 and (part == TRAIN or x % 2 == part - 1):
                    mine.append((at, k))
                at += k
            if mine:
                pieces[m['kind']].append(mine)
        while min(have.values()) < n:
            kind = 'prose' if have['prose'] < n else 'tech'
            a, k = r.choice(r.choice(pieces[kind]))
            m = r.randint(*lengths)
            s = a + r.randrange(0, k - m)
            p = (prefix if r.random() < 0.7 else []) + ids[s:s + m].tolist()
            out.append((p, kind, part, 0 if part != TRAIN else have[kind] % 2, limit))
            have[kind] += 1
        print('text', part, have, flush=True)
    chats([('stories', 20000), ('definitions', 9000), ('prose', 6000), ('talk', 3000), ('persona', 2500), ('knowledge', 5000), ('packages', 2000), ('quiz', 1500), ('sums', 5000), ('copying', 10000),
           ('reversing', 3000), ('sorting', 2500), ('lookups', 3500), ('small', 4500), (None, 6000)], 1, TRAIN, False)
    texts(9000, 2, TRAIN, (12, 90), 224)
    texts(700, 3, TRAIN, (400, 1500), 224)
    for part, seed, k in ((HELD, 20261130, 1), (DVL, 20261131, 6)):
        chats([('stories', 64 * k), ('definitions', 64 * k), ('prose', 32 * k), ('talk', 8 * k), ('knowledge', 12 * k), ('persona', 6 * k), ('quiz', 6 * k), ('sums', 12 * k), ('copying', 20 * k),
               ('reversing', 8 * k), ('sorting', 8 * k), ('lookups', 8 * k), ('small', 8 * k)], seed, part, True)
        texts(64 * k, seed, part, (12, 90), 104)
    held = [i for i, p in enumerate(out) if p[2] != TRAIN]
    out = [p if p[2] == TRAIN else p[:4] + (104,) for p in out]
    kinds = sorted(set(p[1] for p in out))
    os.makedirs(BUILD + '/draft', exist_ok=True)
    np.savez_compressed(BUILD + '/draft/prompts.npz', ids=np.concatenate([np.array(p[0], dtype=np.uint16) for p in out]), lens=np.array([len(p[0]) for p in out], dtype=np.uint16), kind=np.array([kinds.index(p[1]) for p in out], dtype=np.uint8),
                        part=np.array([p[2] for p in out], dtype=np.uint8), temp=np.array([p[3] for p in out], dtype=np.uint8), new=np.array([p[4] for p in out], dtype=np.uint16), kinds=np.array(kinds),
                        stops=np.array([tok.token_to_id(s) for s in STOPS]))
    print(len(out), 'prompts,', len(held), 'of them apart;', sum(len(p[0]) for p in out), 'tokens;', os.path.getsize(BUILD + '/draft/prompts.npz'), 'bytes')


def heldout(n=40):
    """Of each reported kind n prompts that no training saw, evenly from all that were held out: {"kind", "chat", "ids"} a line."""
    z = dict(np.load(BUILD + '/draft/prompts.npz'))
    po = np.concatenate([[0], np.cumsum(z['lens'].astype(np.int64))])
    with open(HERE + '/heldout.jsonl', 'w') as f:
        for kind in REPORTED:
            mine = [k for k in np.flatnonzero(z['part'] == HELD) if z['kinds'][z['kind'][k]] == kind]
            for k in (mine[i * len(mine) // n] for i in range(n)):
                line = {'kind': kind, 'chat': kind not in ('prose', 'tech'), 'ids': z['ids'][po[k]:po[k + 1]].tolist()}
                f.write(json.dumps(line, separators=(',', ':')) + '\n')


# ---- the target answers

class Target:
    """The exported model on the GPU: bf16 arithmetic, the indexers' top 128."""

    def __init__(self, dev):
        import torch, export
        import model as M
        self.torch, self.M, self.dev = torch, M, dev
        self.net = export.load_exported(HERE + '/mini').to(dev)
        for p in self.net.parameters():
            p.requires_grad_(False)
        if dev == 'cpu':                            # rows sorted by expert: a third of the arithmetic
            import polish
            polish.ready(self.net)

    def step(self, x_ids, at, cache, n):
        """Tokens [B, S] at positions at.. -> normed last rows [B, hidden]; cache: K and V of every layer, KI of every producer."""
        torch, M, net = self.torch, self.M, self.net
        F, c = torch.nn.functional, net.c
        B, S = x_ids.shape
        end = at + S
        wide = min(-(-end // 32) * 32, n)           # a few lengths only, and aligned
        cos, sin = self.cos[at:end].repeat(B, 1), self.sin[at:end].repeat(B, 1)
        x = M.cast(F.embedding(x_ids.reshape(-1), net.embed))
        causal = torch.arange(wide, device=self.dev) <= torch.arange(at, end, device=self.dev)[:, None]
        mask = causal[None, None].expand(B, 1, -1, -1)
        for b in net.blocks:
            K, V, KI = cache[b.i]
            xn, qr, q, k, v = M.before_attention(x, cos, sin, b.norm, b.q_a, b.q_norm, b.q_b, b.kv_a, b.kv_norm, b.kv_b, c.heads, c.nope, c.rope, c.v)
            K[:, :, at:end] = k.view(B, S, c.heads, -1).transpose(1, 2)
            V[:, :, at:end] = v.view(B, S, c.heads, -1).transpose(1, 2)
            if b.full:
                KI[:, at:end] = M.index_k(xn, cos, sin, b.wk, b.kn_w, b.kn_b, c.rope).view(B, S, -1)
                if end > c.topk:
                    qi, w = M.index_q(qr, xn, cos, sin, b.wq_b, b.w_proj, c.index_heads, c.index_dim, c.rope)
                    s = torch.relu(torch.einsum('bshd,btd->bsht', qi.view(B, S, c.index_heads, -1), KI[:, :wide]).float() * c.index_dim ** -0.5)
                    s = (s * w.view(B, S, -1)[..., None]).sum(2).masked_fill(~causal, -1e30)
                    mask = (torch.zeros(B, S, wide, dtype=torch.bool, device=self.dev).scatter_(2, s.topk(c.topk, -1).indices, True) & causal)[:, None]
            att = F.scaled_dot_product_attention(q.view(B, S, c.heads, -1).transpose(1, 2), K[:, :, :wide], V[:, :, :wide], attn_mask=mask)
            att = att.transpose(1, 2).reshape(B * S, -1)
            if b.moe:
                x, _ = M.after_attention_moe(x, att, b.o, b.post_norm, b.router, b.bias, b.gate_up, b.down, c.route_scale)
            else:
                x = M.after_attention_dense(x, att, b.o, b.post_norm, b.gate_up, b.down)
        return M.rms(x.view(B, S, -1)[:, -1], net.norm, 1e-5)

    def generate(self, prompts, temps, limits, stops, seed):
        """Prompts of nearly equal length -> answers, each up to and with its stop (stops empty: to its limit)."""
        torch, M, net = self.torch, self.M, self.net
        c, dev, B = net.c, self.dev, len(prompts)
        lens = torch.tensor([len(p) for p in prompts], device=dev)
        n = -(-int(max(len(p) + l for p, l in zip(prompts, limits))) // 32) * 32
        ids = torch.zeros(B, n + 1, dtype=torch.long)
        for i, p in enumerate(prompts):
            ids[i, :len(p)] = torch.from_numpy(np.asarray(p, dtype=np.int64))
        ids = ids.to(dev)
        temps, limits = torch.tensor(temps, device=dev).float(), torch.tensor(limits, device=dev)
        stop = torch.tensor(list(stops) or [-1], device=dev)
        self.cos, self.sin = net.angles(1, n, dev)
        z = lambda *s: torch.zeros(*s, dtype=torch.bfloat16 if M.LOW else torch.float32, device=dev)
        cache = [[z(B, c.heads, n, c.nope + c.rope), z(B, c.heads, n, c.v), z(B, n, c.index_dim) if b.full else None] for b in net.blocks]
        g = torch.Generator(device=dev).manual_seed(seed)
        ends, where = torch.zeros(B, dtype=torch.long, device=dev), torch.arange(B, device=dev)
        final, at, short, tick = ids, 0, int(lens.min()), 0
        while True:
            S = min(16, short - at) if at < short else 1
            h = self.step(ids[:, at:at + S], at, cache, n)
            at += S
            if at >= short:
                logits = (h @ M.cast(net.embed).T).float()
                noise = -torch.log(torch.empty_like(logits).exponential_(generator=g).clamp(min=1e-20))
                new = (logits / temps.clamp(min=1e-3)[:, None] + noise * (temps > 0)[:, None]).argmax(-1)
                given = at < lens
                ids[:, at] = torch.where(given, ids[:, at], new)
                done = ~given & (torch.isin(ids[:, at], stop) | (at + 1 >= lens + limits)) & (ends == 0)
                ends[done] = at + 1
                tick += 1
                if tick % 8 == 0 or at >= n - 1:
                    live = ends == 0
                    k = int(live.sum())
                    if k == 0 or k < 0.7 * len(ends) or at >= n - 1:
                        if final is not ids:
                            final[where] = ids
                        if len(where) == B:
                            last = ends.clone()
                        else:
                            last[where] = ends
                        if k == 0 or at >= n - 1:
                            break
                        keep = live.nonzero()[:, 0]
                        final = final.clone() if final is ids else final
                        where, ids, ends, lens, temps, limits = where[keep], ids[keep], ends[keep], lens[keep], temps[keep], limits[keep]
                        cache = [[None if t is None else t[keep] for t in l] for l in cache]
        last, final = last.tolist(), final.cpu().numpy()
        return [final[i, len(p):last[i] or n].astype(np.uint16) for i, p in enumerate(prompts)]


def answers(args, log):
    import torch
    import model as M
    dev = 'cuda' if torch.cuda.is_available() else 'cpu'
    M.LOW = dev == 'cuda'
    torch.set_float32_matmul_precision('high')
    z = dict(np.load(args.prompts))                 # a dict: the archive unpacks an array at every look
    offs = np.concatenate([[0], np.cumsum(z['lens'].astype(np.int64))])
    ids, lens, part, new, kind = z['ids'], z['lens'].astype(np.int64), z['part'], z['new'], z['kind']
    order = np.lexsort((np.arange(len(lens)), lens // 4, new, kind, part == 0))    # held-out ones have batches of their own: they run on past their stop
    if args.limit:
        order = np.concatenate([order[part[order] == 0][::max(1, len(order) // args.limit)], order[part[order] > 0][::max(1, len(order) // args.limit)]])
    if args.temp:                                   # the held-out prompts alone, sampled
        order, z['temp'] = order[part[order] == HELD], np.full(len(part), args.temp)
    target, out, i, made = Target(dev), {}, 0, 0
    while i < len(order) and time.time() - args.began < args.wall - 25:
        held = part[order[i]] > 0
        size, j = (1024 if lens[order[i]] > 350 else 4096), i
        while j < len(order) and j - i < size and (part[order[j]] > 0) == held and kind[order[j]] == kind[order[i]] and lens[order[j]] < lens[order[i]] + 48 and (lens[order[j]] > 350) == (lens[order[i]] > 350):
            j += 1
        some = order[i:j]
        t0 = time.time()
        with torch.no_grad():
            got = target.generate([ids[offs[k]:offs[k + 1]] for k in some], z['temp'][some].tolist(), new[some].tolist(), [] if held else z['stops'].tolist(), seed=i)
        for k, a in zip(some, got):
            out[k] = a
            made += len(a)
        if i == 0 or (j // 8192 > i // 8192) or j == len(order):
            log('%d of %d answers, %.2f M tokens; last batch %d rows, %.1f s' % (j, len(order), made / 1e6, len(some), time.time() - t0))
        i = j
    keys = np.array(sorted(out))
    np.savez_compressed(args.data + '/answers.npz', which=keys.astype(np.int32), ids=np.concatenate([out[k] for k in keys]), lens=np.array([len(out[k]) for k in keys], dtype=np.uint16))
    log('answers.npz: %d bytes' % os.path.getsize(args.data + '/answers.npz'))
    from tokenizers import Tokenizer
    tok, r = Tokenizer.from_file(HERE + '/mini/tokenizer.json'), random.Random(1)
    for name in z['kinds']:
        mine = [k for k in keys if z['kinds'][kind[k]] == name]
        log('%-12s %6d answers, mean length %.1f' % (name, len(mine), np.mean([len(out[k]) for k in mine] or [0])))
        for k in r.sample(mine, min(3, len(mine))):
            log('   T=%g %r -> %r' % (z['temp'][k], tok.decode(ids[offs[k]:offs[k + 1]].tolist(), skip_special_tokens=False)[-110:], tok.decode(out[k].tolist(), skip_special_tokens=False)[:170]))


# ---- features and hidden states of everything, on the GPU

class Store:
    """All documents one behind the other: tokens, positions, which are the answer's, taps and last normed hidden states.  Prompts are cut to
    their last 256 tokens, which is all that a drafter sees; positions stay true.  Training documents come first, shuffled."""

    def __init__(self, args, taps, dev, log):
        import torch
        import model as M
        self.taps, self.dev = list(taps), dev
        z, a = dict(np.load(args.prompts)), dict(np.load(args.data + '/answers.npz'))
        po, ao = (np.concatenate([[0], np.cumsum(x['lens'].astype(np.int64))]) for x in (z, a))
        which = a['which']
        order = np.random.default_rng(7).permutation(len(which))
        if args.limit:
            order = np.concatenate([order[z['part'][which[order]] == p][:args.limit // (1 if p == 0 else 4)] for p in (0, 1, 2)])
        if args.what[0] == 'report':
            order = order[z['part'][which[order]] == HELD]
        order = order[np.argsort(z['part'][which[order]] != TRAIN, kind='stable')]
        docs, self.first, self.answer, n = [], [], [], 0
        for o in order:
            k = which[o]
            p, r = z['ids'][po[k]:po[k + 1]], a['ids'][ao[o]:ao[o + 1]]
            drop = max(0, len(p) - 256)
            docs.append((np.concatenate([p, r]), drop))
            self.first.append(n)
            self.answer.append(n + len(p) - drop)
            n += len(p) + len(r) - drop
        self.part, self.kind, self.temp = z['part'][which[order]], [str(z['kinds'][i]) for i in z['kind'][which[order]]], z['temp'][which[order]]
        self.n_train = int((self.part == TRAIN).sum())
        self.stops, self.length = set(z['stops'].tolist()), n
        self.train_tokens = self.first[self.n_train] if self.n_train < len(docs) else n
        count = np.diff(np.array(self.first + [n]))
        wide = lambda v, dt: torch.from_numpy(np.repeat(np.asarray(v), count)).to(dev, dt)
        at = np.arange(n)
        self.tokens = torch.from_numpy(np.concatenate([d[c:] for d, c in docs]).astype(np.int64)).to(dev)
        self.doc, self.hard = wide(np.arange(len(docs)), torch.int32), wide(self.temp == 0, torch.bool)
        self.pos = torch.from_numpy(at - np.repeat(np.array(self.first) - np.array([c for _, c in docs]), count)).to(dev)
        self.resp = torch.from_numpy(at >= np.repeat(np.array(self.answer), count)).to(dev)
        self.start = torch.tensor(self.first[:self.n_train], dtype=torch.long, device=dev)
        low = torch.bfloat16 if M.LOW else torch.float32
        self.feat = torch.empty(n, len(taps), 320, dtype=low, device=dev)
        self.last = torch.empty(n, 320, dtype=low, device=dev)
        self.target = Target(dev)
        net, by, t0, agree, seen = self.target.net, {}, time.time(), 0, 0
        for i, (d, _) in enumerate(docs):
            by.setdefault(-(-len(d) // 64) * 64, []).append(i)
        with torch.no_grad():
            for T in sorted(by):
                B = min(len(by[T]), max(1, (131072 if M.LOW else 2048) // T))
                for x in range(0, len(by[T]), B):
                    some = by[T][x:x + B]
                    ids = np.zeros((B, T), dtype=np.int64)
                    flat, to = [], []
                    for b, i in enumerate(some):
                        d, c = docs[i]
                        ids[b, :len(d)] = d
                        flat.append(b * T + np.arange(c, len(d)))
                        to.append(self.first[i] + np.arange(len(d) - c))
                    flat, to, got = torch.from_numpy(np.concatenate(flat)).to(dev), torch.from_numpy(np.concatenate(to)).to(dev), []
                    h, _, _ = net(torch.from_numpy(ids).to(dev), sparse=T > net.c.topk, hidden_taps=got)
                    for k, t in enumerate(taps):
                        self.feat[to, k] = got[t][flat]
                    self.last[to] = M.rms(h[flat], net.norm, 1e-5)
                    del got, h
                net.masks.clear()
                net.tables.clear()
                M._scores.clear()
            for x in range(0, n - 1, 65536):        # the stream is what the forward pass would choose: a check of both
                y = slice(x, min(n - 1, x + 65536))
                use = self.hard[y] & self.resp[y.start + 1:y.stop + 1]
                if use.any():
                    best = (self.last[y][use] @ M.cast(net.embed).T).argmax(-1)
                    agree += int((best == self.tokens[y.start + 1:y.stop + 1][use]).sum())
                    seen += int(use.sum())
        log('%d documents, %d tokens (%d train), features after layers %s in %.1f s; greedy streams: %.3f%% of tokens are the forward pass\'s argmax' % (len(docs), n, self.train_tokens, self.taps, time.time() - t0, 100 * agree / max(1, seen)))

    def batch(self, R, T, A, m, g):
        """R rows of T tokens from document starts, A anchors in each -> what a step needs."""
        import torch
        s = self.start[torch.randint(0, self.n_train, (R,), device=self.dev, generator=g)].clamp(max=max(0, self.train_tokens - T - m - 2))
        idx = s[:, None] + torch.arange(T + m + 1, device=self.dev)
        tok, doc, resp = self.tokens[idx], self.doc[idx], self.resp[idx]
        ok = resp[:, :T] & resp[:, 1:T + 1]
        j = torch.rand(R, T, device=self.dev, generator=g).masked_fill(~ok, -1).topk(A, -1).indices
        jj = j[..., None] + torch.arange(1, m + 1, device=self.dev)
        take = lambda x, i: x.gather(1, i.view(R, -1)).view(i.shape)
        good = ok.gather(1, j)[..., None] & take(resp, jj) & (take(doc, jj) == doc.gather(1, j)[..., None])
        th = self.last[(s[:, None] + (jj - 1).view(R, -1))].view(-1, 320)
        return dict(idx=idx[:, :T], doc=doc[:, :T], pos=self.pos[idx[:, :T]], j=j, anchor=tok.gather(1, j), at=self.pos[s[:, None] + j], labels=take(tok, jj).reshape(-1), prev=take(tok, jj - 1).reshape(-1), good=good, th=th,
                    hard=self.hard[s[:, None] + j][..., None].expand(good.shape).reshape(-1).float())


# ---- rounds

def rounds(net, store, part, tokens=96, keep=False):
    """Greedy block decoding of the prompts of one part, at most `tokens` new tokens each, as one pass over every position and a walk.
    -> rows (kind, rounds, emitted, accepted + 1 not cut at the end, reached and accepted per slot), and with keep: features and accepted counts
    of (all positions, walked positions)."""
    import torch
    import drafter as D
    c, dev, m = net.c, store.dev, net.c.drafts
    some = [i for i in range(len(store.part)) if store.part[i] == part]
    f, net.f = net.f, {k: getattr(D, k) for k in net.f}
    embed, head, T, A = store.target.net.embed, store.target.net.embed, 384, tokens
    cols, bits, out, kept = [store.taps.index(t) for t in c.taps], D.block_bits(A, c, dev), [], [[], [], [], [], []]
    for x in range(0, len(some), 16):
        mine = some[x:x + 16]
        s = torch.tensor([store.first[i] for i in mine], device=dev)
        j = torch.tensor([store.answer[i] - store.first[i] for i in mine], device=dev)[:, None] + torch.arange(A, device=dev)
        idx = (s[:, None] + torch.arange(T, device=dev)).clamp(max=store.length - 1)
        with torch.no_grad():
            at = (s[:, None] + j).clamp(max=store.length - 1)
            anchor = store.tokens[at]
            h = net(store.feat[idx][:, :, cols].flatten(2), store.pos[idx], embed, anchor, store.pos[at], D.visible(store.doc[idx], j, c, bits))
            p = net.propose(h.flatten(0, 1), anchor.view(-1), head)
            want = store.tokens[(at[..., None] + torch.arange(1, m + 1, device=dev)).clamp(max=store.length - 1)].view(-1, m)
            acc = (p['drafts'] == want).int().cumprod(-1).sum(-1).view(-1, A).tolist()
            stream = anchor.tolist()
        stats = p['stats'].view(len(mine), A, m, 18).cpu() if keep else None
        for b, i in enumerate(mine):
            L = next((t + 1 for t in range(tokens) if stream[b][t] in store.stops), tokens)
            t, r = 0, [store.kind[i], 0, 0, 0, [0] * m, [0] * m]
            while t < L - 1:
                a = acc[b][t]
                r[1] += 1
                r[2] += min(a + 1, L - 1 - t)
                r[3] += a + 1
                for k in range(m):
                    r[4][k] += a >= k
                    r[5][k] += a > k
                if keep:
                    kept[2].append(stats[b, t])
                    kept[3].append(a)
                    kept[4].append(store.kind[i])
                t += a + 1
            if keep and L > 1:
                kept[0] += list(stats[b, :L - 1])
                kept[1] += acc[b][:L - 1]
            out.append(r)
    net.f = f
    if keep:
        return out, [torch.stack(kept[0]), torch.tensor(kept[1]), torch.stack(kept[2]), torch.tensor(kept[3]), kept[4]]
    return out


def table(out):
    kinds, lines = {}, []
    for kind, r, e, u, reach, acc in out:
        k = kinds.setdefault(kind, [0, 0, 0, 0, np.zeros(len(reach)), np.zeros(len(reach))])
        k[0] += 1
        for i, v in enumerate((r, e, u)):
            k[1 + i] += v
        k[4] += reach
        k[5] += acc
    mean = lambda i: sum(kinds[k][i] / max(1, kinds[k][1]) for k in REPORTED if k in kinds) / max(1, sum(k in kinds for k in REPORTED))
    for k in REPORTED + ('open', 'other'):
        if k in kinds:
            n, r, e, u, reach, acc = kinds[k]
            lines.append('%-12s %4d prompts %5d rounds: emitted %.2f, uncut %.2f; slots %s' % (k, n, r, e / max(1, r), u / max(1, r), ' '.join('%.2f' % v for v in acc / np.maximum(reach, 1))))
    return mean(2), mean(3), kinds, lines


# ---- training

def train_one(spec, store, args, log):
    """spec: 'dflash2,layers=2,inner=768,seconds=200,...' """
    import torch
    import drafter as D, model as M, train as T_
    kind, *rest = spec.split(',')
    o = dict(layers='2', inner='768', heads='8', kv='4', taps=TAPS, rank='32', seconds='60', opt='muon', lr='1', hard='1', name='', rows='64', anchors='64', block='8' if kind == 'dflash2' else '7', length='512')
    o.update(x.split('=') for x in rest)
    dev, gpu = store.dev, store.dev == 'cuda'
    torch.manual_seed(args.seed)
    c = D.Config(kind=kind, layers=int(o['layers']), inner=int(o['inner']), heads=int(o['heads']), kv=int(o['kv']), taps=tuple(map(int, o['taps'].split('-'))), rank=int(o['rank']), block=int(o['block']))
    net = D.Drafter(c, compiled=gpu).to(dev)
    with torch.no_grad():                           # the borrowed head expects rows of the target's scale; a smaller one makes a calmer start
        net.norm.weight.copy_(0.4 * store.target.net.norm)
    name, total = o['name'] or kind, float(o['seconds'])
    log('%s: %s, %.2f M parameters, %.2f MB' % (name, spec, sum(p.numel() for p in net.parameters()) / 1e6, sum(p.numel() for p in net.parameters()) * 2e-6))
    muon_ps, adam_ps = [], []
    for k, p in net.named_parameters():
        inside = k == 'fc.weight' or ('.self_attn.' in k or '.mlp.' in k) and k.endswith('proj.weight')
        (muon_ps if inside and o['opt'] == 'muon' else adam_ps).append(p)
    muon = T_.Muon([(p, tuple(p.shape)) for p in muon_ps], decay=0.02) if muon_ps else None
    base = 2e-3 if o['opt'] == 'muon' else 1.5e-3
    adam = torch.optim.AdamW(adam_ps, lr=base, betas=(0.9, 0.95), weight_decay=0.0, fused=gpu)
    clock, step, since, t_last, window = 0.0, 0, 0.0, time.time(), []
    path = '%s/%s.pt' % (args.checkpoints, name)
    if os.path.exists(path):
        ck = torch.load(path, map_location=dev)
        net.load_state_dict(ck['model'])
        adam.load_state_dict(ck['adam'])
        for p, v in zip(muon_ps, ck['muon']):
            muon.momentum[p].copy_(v)
        clock, step = ck['clock'], ck['step']
        log('%s: resumed at clock %.1f, step %d' % (name, clock, step))
    R, A, T, m = int(o['rows']), int(o['anchors']), int(o['length']), c.drafts
    bits, cols = D.block_bits(A, c, dev), [store.taps.index(t) for t in c.taps]
    g = torch.Generator(device=dev).manual_seed(args.seed + step)
    embed = store.target.net.embed.detach()
    decay = torch.exp(-torch.arange(m, device=dev) / 4)
    next_eval, next_save = clock + 0.2 * total, clock + 60.0

    def one(frac):
        b = store.batch(R, T, A, m, g)
        h = net(store.feat[b['idx']][:, :, cols].flatten(2), b['pos'], embed, b['anchor'], b['at'], D.visible(b['doc'], b['j'], c, bits))
        w = (b['good'] * decay).view(-1)
        hard = b['hard'] * float(o['hard'])
        if kind == 'dspark':
            mk, cf = net.markov_head, net.confidence_head.proj
            tv = min(1.0, max(0.0, (frac - 0.3) / 0.1))
            loss, hit = net.f['dspark_loss'](h.reshape(-1, c.hidden), b['th'], b['prev'], b['labels'], w, hard, embed, mk.markov_w1.weight, mk.markov_w2.weight, cf.weight, cf.bias, torch.tensor(tv, device=dev))
            sel = None
        else:
            h = h[:, :, 1:].reshape(-1, c.hidden)
            loss, hit = net.f['dflash_loss'](h, b['th'], b['labels'], w, hard, embed)
            sel = None
            if kind == 'dflash2' and frac > 0.1:
                q, s = len(h) // 4, net.candidate_selector          # a quarter of the blocks, at random since rows are
                ls, sel = net.f['selector_loss'](h[:q], b['prev'][:q], b['labels'][:q], w[:q], embed, s.hidden_projection.weight, s.predecessor_codebook, s.successor_codebook, c.top)
                loss = loss + ls
        loss.backward()
        lr = float(o['lr']) * min(1.0, (step + 1) / 60) * min(1.0, max(0.0, (1 - frac) / 0.6))
        if muon:
            muon.step(5e-3 * lr)
        torch.nn.utils.clip_grad_norm_(adam_ps, 1.0)
        for q in adam.param_groups:
            q['lr'] = base * lr
        adam.step()
        for p in net.parameters():
            p.grad = None
        with torch.no_grad():
            gd = b['good'].view(-1, m).float()
            return torch.cat((loss.detach()[None], (hit.view(-1, m) * gd).sum(0) / gd.sum(0).clamp(min=1), (torch.zeros(1, device=dev) if sel is None else ((sel * gd.view(-1)[:len(sel)]).sum() / gd.view(-1)[:len(sel)].sum())[None])))

    def save():
        os.makedirs(args.checkpoints, exist_ok=True)
        torch.save(dict(model=net.state_dict(), adam=adam.state_dict(), muon=[muon.momentum[p] for p in muon_ps] if muon else [], clock=clock, step=step), path)
        D.save(net, '%s/%s' % (args.out, name))

    def evaluate(tag):
        t0 = time.time()
        e, u, kinds, lines = table(rounds(D_rounded(net), store, HELD))
        log('%s %s at clock %.0f, step %d: emitted a round %.2f (uncut %.2f), mean of five kinds; %s (%.1f s)' % (name, tag, clock, step, e, u, ', '.join('%s %.2f (%.2f)' % (k, kinds[k][2] / max(1, kinds[k][1]), kinds[k][3] / max(1, kinds[k][1])) for k in REPORTED + ('open', 'other') if k in kinds), time.time() - t0))
        return lines

    while clock < total and time.time() - args.began < args.wall - 12:
        window.append(one(clock / total))
        step += 1
        if step % 10 == 0 or not gpu:
            window[-1][0].item()
            now = time.time()
            clock += min(now - t_last, 2.0)
            since += now - t_last
            t_last = now
            if step % 500 == 0 or step in (50, 200) or not gpu:
                v = torch.stack(window).mean(0).tolist()
                log('%s step %5d clock %5.0f loss %.4f hits %s selector %.3f, %.1f ms a step' % (name, step, clock, v[0], ' '.join('%.3f' % x for x in v[1:-1]), v[-1], 1000 * since / len(window)))
                window, since = [], 0.0
            if clock > next_eval:
                evaluate('part')
                next_eval += 0.2 * total
                t_last = time.time()
            if clock > next_save:
                save()
                next_save += 60
                t_last = time.time()
    save()
    for l in evaluate('done'):
        log('   ' + l)
    return net


def D_rounded(net):
    """The same drafter with its weights as they are stored."""
    import drafter as D
    n = D.Drafter(net.c).to(net.fc.weight.device)
    n.load_state_dict({k: v.detach().bfloat16().float() for k, v in net.state_dict().items()})
    return n


# ---- the predictor of accepted lengths

def dvl(net, store, out, log):
    """126 numbers (slot by slot, 18 each) -> two hidden layers -> 7 scores; fitted on rounds of prompts of its own, judged on held-out ones."""
    import torch
    from safetensors.torch import save_file
    F, dev = torch.nn.functional, store.dev
    _, (X, y, *_) = rounds(net, store, DVL, keep=True)
    _, (_, _, Xh, yh, _) = rounds(net, store, HELD, keep=True)
    m = net.c.drafts
    X, Xh = X.reshape(len(X), -1).float().to(dev), Xh.reshape(len(Xh), -1).float().to(dev)
    y, yh = y.to(dev), yh.to(dev)
    cut = int(0.85 * len(X))                        # documents lie one behind the other, so the rest is of other prompts: it chooses the size
    label = lambda a: (a[:, None] > torch.arange(m, device=dev)).float()
    mu, sd = X.mean(0), X.std(0).clamp(min=1e-3)
    Xn = (X - mu) / sd

    def fit(hidden, drop, steps=4000):
        torch.manual_seed(3)
        sizes = [m * 18] + hidden + [m]
        W = [torch.nn.Linear(a, b).to(dev) for a, b in zip(sizes, sizes[1:])]
        opt = torch.optim.AdamW([p for w in W for p in w.parameters()], lr=2e-3, weight_decay=2e-2)

        def lost(x, a, p):
            z = apply(W, x, p)
            return F.binary_cross_entropy_with_logits(z, label(a)) + 0.02 * ((z.sigmoid().sum(-1) - a) ** 2).mean()
        for i in range(steps):
            b = torch.randint(0, cut, (2048,), device=dev)
            loss = lost(Xn[b] + 0.05 * torch.randn(2048, m * 18, device=dev), y[b], drop)
            opt.zero_grad()
            loss.backward()
            for q in opt.param_groups:
                q['lr'] = 2e-3 * (1 - i / steps)
            opt.step()
        with torch.no_grad():
            return lost(Xn[cut:], y[cut:], 0.0).item(), W

    def apply(W, x, p=0.0):
        for i, w in enumerate(W):
            x = w(x)
            x = F.dropout(torch.relu(x), p, p > 0) if i + 1 < len(W) else x
        return x
    tried = [(fit(h, p), h, p) for h, p in (([64, 32], 0.0), ([128, 64], 0.1), ([192, 96], 0.2))]
    for (l, _), h, p in tried:
        log('dvl: hidden %s, dropout %.1f: loss on other prompts %.4f' % (h, p, l))
    (_, W), h, _ = min(tried, key=lambda t: t[0][0])
    with torch.no_grad():                           # the normalisation goes into the first layer, so that a reader needs none
        W[0].bias -= W[0].weight @ (mu / sd)
        W[0].weight /= sd
        res = dict(rounds_trained=len(X), **judge(apply(W, Xh), yh))
    os.makedirs(out, exist_ok=True)
    tensors = {}
    for i, w in enumerate(W):
        tensors['mlp.%d.weight' % i], tensors['mlp.%d.bias' % i] = w.weight.detach().cpu().contiguous(), w.bias.detach().cpu().contiguous()
    save_file(tensors, out + '/dvl.safetensors')
    json.dump({'slots': m, 'features_per_slot': 18, 'features': ['top logit', 'top logit - logit of rank 2..16 (15)', 'log-probability of the top token', 'entropy (nats)'], 'layers': len(W), 'activation': 'relu', 'output': 'logits; score_j = min over i <= j of sigmoid(z_i)',
               'measured': res}, open(out + '/dvl.json', 'w'), indent=1)
    log('dvl: ' + json.dumps(res))


def judge(z, a, N=16):
    """Logits [n, 7] and accepted counts of rounds: R^2, what the windows alone keep, what N rounds together keep under budgets of b rows a
    request (8 is full width), beside a fixed width and an oracle that knows every accepted count."""
    import torch
    m = z.shape[1]
    s = z.sigmoid()
    mono = s.cummin(-1).values
    r2 = 1 - ((s.sum(-1) - a) ** 2).sum().item() / ((a - a.float().mean()) ** 2).sum().item()
    k = (1 + mono.sum(-1).round()).clamp(1, m + 1)
    res = dict(rounds=len(a), mean_accepted=a.float().mean().item(), r2=r2, window_rows=k.mean().item(), window_kept=(torch.minimum(a, k - 1).sum() / a.sum()).item())
    perm = torch.randperm(len(a), generator=torch.Generator().manual_seed(5)).to(a.device)[:len(a) // N * N]
    mono, a = mono[perm].view(-1, N, m), a[perm].view(-1, N)
    order = mono.transpose(1, 2).flatten(1).argsort(dim=-1, descending=True, stable=True)      # score descending, then draft index, then request
    rank = order.argsort(dim=-1).view(-1, m, N).transpose(1, 2)
    for b in (2, 3, 4, 5, 6):
        n = (b - 1) * N
        res['kept_%d_rows' % b] = (torch.minimum(a, (rank < n).sum(-1)).sum() / a.sum()).item()
        res['fixed_%d_rows' % b] = (a.clamp(max=b - 1).sum() / a.sum()).item()
        res['oracle_%d_rows' % b] = (a.sum(-1).clamp(max=n).sum() / a.sum()).item()
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in res.items()}


def judge_file(folder, kept, log):
    """A stored predictor on the walked rounds of held-out prompts: all together, kind by kind, and with every kind as often as any other."""
    import torch
    from safetensors.torch import load_file
    t, x, a, kinds = load_file(folder + '/dvl.safetensors'), kept[2].flatten(1).float(), kept[3], kept[4]
    for i in range(len(t) // 2):
        x = x @ t['mlp.%d.weight' % i].T + t['mlp.%d.bias' % i]
        x = torch.relu(x) if 2 * i + 2 < len(t) else x
    log('dvl all: ' + json.dumps(judge(x, a)))
    by = {k: [i for i, v in enumerate(kinds) if v == k] for k in sorted(set(kinds))}
    for k, at in by.items():
        log('dvl %s: %s' % (k, json.dumps(judge(x[at], a[at]))))
    r = random.Random(1)
    at = [i for v in by.values() for i in r.choices(v, k=1000)]
    log('dvl, every kind as often: ' + json.dumps(judge(x[at], a[at])))


# ---- golden values

def golden(folder, log):
    """A few held-out prompts, greedy, with the target in the loop and F32 arithmetic throughout (weights as stored): FOLDER/DRAFTER-KIND.safetensors
    with the tensor names of ../shared/fixtures/drafters/README.md.  Every round runs the target anew over all its tokens, which is slow and
    leaves no cache to be wrong."""
    import torch
    import drafter as D, model as M
    from safetensors.torch import load_file, save_file
    M.LOW = False
    target = Target('cpu')
    net = target.net
    z = dict(np.load(BUILD + '/draft/prompts.npz'))
    po = np.concatenate([[0], np.cumsum(z['lens'].astype(np.int64))])
    os.makedirs(folder, exist_ok=True)
    chosen = [(str(z['kinds'][z['kind'][k]]), z['ids'][po[k]:po[k + 1]].tolist()) for k in np.flatnonzero(z['part'] == HELD) if 14 <= z['lens'][k] <= 60]
    stops = set(z['stops'].tolist())
    predictor = load_file(HERE + '/draft-dflash2/dvl/dvl.safetensors')

    def forward(ids):
        taps = []
        h, _, _ = net(torch.tensor([ids]), sparse=len(ids) > net.c.topk, hidden_taps=taps)
        return taps, net.logits(h)

    def scores(stats):
        x = stats.reshape(1, -1).float()
        for i in range(len(predictor) // 2):
            x = x @ predictor['mlp.%d.weight' % i].T + predictor['mlp.%d.bias' % i]
            x = torch.relu(x) if 2 * i + 2 < len(predictor) else x
        return x[0].sigmoid().cummin(-1).values

    for which in ('dflash2', 'dspark'):
        d = D.load(HERE + '/draft-' + which)
        c, m = d.c, d.c.drafts
        written = set()
        for kind, prompt in chosen:
            if kind in written or kind not in ('stories', 'tasks', 'tech'):
                continue
            new = 144 if kind == 'stories' else 48
            g = {k: [] for k in ('round.anchor_pos', 'round.anchor_id', 'round.proposed', 'round.target_ids', 'round.accepted', 'round.successor', 'unary.ids', 'unary.values', 'sel.scores', 'chain.ids', 'chain.values', 'conf.logit', 'dvl.features', 'dvl.scores')}
            hidden, gap, wide = [], 9.0, 9.0
            with torch.no_grad():
                taps, logits = forward(prompt)
                toks = prompt + [int(logits[-1].argmax())]
                while len(toks) - len(prompt) < new and not stops & set(toks[len(prompt):]):
                    n = len(toks) - 1
                    f = torch.cat([taps[t][:n] for t in c.taps], -1)
                    anchor = torch.tensor([toks[n]])
                    mask = D.visible(torch.zeros(1, n + 1, dtype=torch.long), torch.tensor([[n]]), c, D.block_bits(1, c, 'cpu'))
                    mask = torch.cat((mask[..., :n], mask[..., n + 1:]), -1)
                    h = d(f[None], torch.arange(n)[None], net.embed, anchor[None], torch.tensor([[n]]), mask)[0]
                    p = d.propose(h, anchor, net.embed)
                    drafts = p['drafts'][0].tolist()
                    taps, logits = forward(toks + drafts)
                    rows = logits[n:]
                    want, a = rows.argmax(-1).tolist(), 0
                    while a < m and drafts[a] == want[a]:
                        a += 1
                    two = rows[:a + 1].topk(2, -1).values
                    gap = min(gap, (two[:, 0] - two[:, 1]).min().item())
                    if 'scores' in p:
                        s = p['scores'] if c.kind == 'dflash2' else p['scores'][0]
                        two = s[0].topk(2, -1).values
                        wide = min(wide, (two[:, 0] - two[:, 1]).min().item())
                    if len(hidden) < 2:
                        hidden.append(h[0])
                    row = {'round.anchor_pos': n, 'round.anchor_id': toks[n], 'round.proposed': drafts, 'round.target_ids': want, 'round.accepted': a, 'round.successor': want[a], 'unary.ids': p['top'][0], 'unary.values': p['values'][0]}
                    if c.kind == 'dflash2':
                        row.update({'sel.scores': p['scores'][0], 'dvl.features': p['stats'][0], 'dvl.scores': scores(p['stats'])})
                    else:
                        row.update({'chain.values': p['scores'][0][0], 'chain.ids': p['scores'][1][0], 'conf.logit': p['conf'][0]})
                    for k, v in row.items():
                        if k.startswith('round.') or len(g[k]) < 8:             # the chain of eight rounds, ids and counts of all
                            g[k].append(v)
                    toks += drafts[:a] + [want[a]]
            if min(gap, wide) < 4e-3 or len(g['round.accepted']) < 2:           # ties are no test
                continue
            written.add(kind)
            ids = toks[len(prompt):len(prompt) + new]
            cut = next((i + 1 for i, t in enumerate(ids) if t in stops), new)
            whole = lambda v: torch.tensor(v, dtype=torch.int32) if not torch.is_tensor(v[0]) else torch.stack(v).int() if not v[0].is_floating_point() else torch.stack(v).float()
            out = {k: whole(v) for k, v in g.items() if v}
            out.update({'prompt_ids': whole(prompt), 'output_ids': whole(ids[:cut]), 'block.hidden': torch.stack(hidden), 'min_gap': torch.tensor([gap, wide])})
            save_file({k: v.contiguous() for k, v in out.items()}, '%s/%s-%s.safetensors' % (folder, which, kind))
            acc = out['round.accepted'].tolist()
            log('%s %s: %d rounds, accepted %s, %d ids, closest decision of the target %.4f, of the drafter %.4f; %d bytes' % (which, kind, len(acc), acc, cut, gap, wide, os.path.getsize('%s/%s-%s.safetensors' % (folder, which, kind))))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument('what', nargs='+', help='prompts | heldout | answers | train SPEC ... | dvl DRAFTER OUT | report DRAFTER [DVL]')
    ap.add_argument('--data', default=BUILD + '/draft')
    ap.add_argument('--prompts', default=BUILD + '/draft/prompts.npz')
    ap.add_argument('--out', default='')
    ap.add_argument('--checkpoints', default='/tmp/drafters')
    ap.add_argument('--wall', type=float, default=570, help='seconds after which the process has ended')
    ap.add_argument('--limit', type=int, default=0)
    ap.add_argument('--temp', type=float, default=0, help='with answers: the held-out prompts alone, at this temperature, for a report')
    ap.add_argument('--dvl', default='', help='with train: fit the predictor on the run of this name')
    ap.add_argument('--seed', type=int, default=1)
    args = ap.parse_args()
    args.began = time.time()
    args.out = args.out or args.data
    os.makedirs(args.out, exist_ok=True)
    logfile = open(args.out + '/drafters.log', 'a')

    def log(s):
        line = '%7.1f %s' % (time.time() - args.began, s)
        print(line, flush=True)
        logfile.write(line + '\n')
        logfile.flush()
    if args.what[0] == 'prompts':
        return prompts()
    if args.what[0] == 'heldout':
        return heldout()
    if args.what[0] == 'answers':
        return answers(args, log)
    if args.what[0] == 'golden':
        return golden(args.what[1], log)
    import torch
    import drafter as D, model as M
    dev = 'cuda' if torch.cuda.is_available() else 'cpu'
    M.LOW = dev == 'cuda'
    torch.set_float32_matmul_precision('high')
    if args.what[0] == 'train':
        taps = [dict(x.split('=') for x in s.split(',')[1:]).get('taps', TAPS) for s in args.what[1:]]
    else:
        taps = ['-'.join(map(str, D.load(args.what[1]).c.taps))]
    store = Store(args, sorted(set(int(i) for t in taps for i in t.split('-'))), dev, log)
    if args.what[0] == 'train':
        for spec in args.what[1:]:
            net = train_one(spec, store, args, log)
            name = dict(x.split('=') for x in spec.split(',')[1:]).get('name', spec.split(',')[0])
            if args.dvl == name:
                dvl(D_rounded(net), store, '%s/%s/dvl' % (args.out, name), log)
    else:
        net = D.load(args.what[1]).to(dev)
        if args.what[0] == 'dvl':
            dvl(net, store, args.what[2], log)
        else:
            got, kept = rounds(net, store, HELD, keep=True)
            e, u, _, lines = table(got)
            log('emitted a round %.2f, uncut %.2f (mean of %s)' % (e, u, ', '.join(REPORTED)))
            for l in lines:
                log('   ' + l)
            if len(args.what) > 2:
                judge_file(args.what[2], kept, log)


if __name__ == '__main__':
    main()
