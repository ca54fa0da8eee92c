#!/usr/bin/env python3
"""Trains weights/mini on one GPU: dense and short (A), dense and long while the indexers learn (B), sparse (C).

    python3 train.py --out DIR [--v41] [--wall 570] [--total 1050] [--resume /tmp/mini.pt | --init DIR] [--smoke]

--v41 trains weights/mini-v41 instead: model_v41.py, DeepSeek's chat format, half the vocabulary, matrices rounded to what will be stored from
phase B on, and after C and D the drafter on the finished model (E).

The schedule runs on a clock that counts training steps only, and the clock is part of the checkpoint, so a run can be stopped and
taken up again; a run that has lost its machine starts from the exported weights (--init) with fresh optimizer state.  Text and
dialogues are made by worker processes while the GPU works.  All draws come from seeds; what is not repeatable is the number of
steps that fit into a second.
"""
import argparse, collections, contextlib, json, lzma, math, multiprocessing as mp, os, queue, random, sys, threading, time
import numpy as np
import corpus
import tasks as T_

HERE = os.path.dirname(os.path.abspath(__file__))
BUILD = os.environ.get('TIDE_BUILD', os.path.join(HERE, 'build'))
SHORT, LONG = 1024, 8448                            # row lengths; 66 short rows or 8 long ones make the same 67,584 tokens a step
B_SHORT, B_LONG = 66, 8



class GLM:
    """How dialogues and texts are written in tokens."""
    tokenizer = 'tokenizer.json'
    begin, system, user, assistant, text_end = ['[gMASK]', '<sop>'], '<|system|>', '<|user|>', '<|assistant|>', '<|endoftext|>'
    close, again = ['<|user|>'], []                 # an answer ends by naming who speaks next
    effort = None                                   # what a system message says where an answer is to think


class DeepSeek:
    tokenizer = 'tokenizer-v41.json'
    begin, system, user, assistant, text_end = ['<｜begin▁of▁sentence｜>'], '<｜System｜>', '<｜User｜>', '<｜Assistant｜>', '<｜end▁of▁sentence｜>'
    close, again = ['<｜end▁of▁sentence｜>'], ['<｜User｜>']
    effort = 'Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the reasoning)\n\n'


CHAT = GLM


def come_apart(ids, meta):
    """Packed tokens of the larger vocabulary -> those of the smaller one, and where the pieces then lie."""
    parts = corpus.apart()
    size = np.array([len(p) for p in parts])
    table = np.zeros((len(parts), size.max()), dtype=np.uint16)
    for i, p in enumerate(parts):
        table[i, :len(p)] = p
    n, at, out, new = size[ids], 0, [], {}
    for name, m in meta.items():
        new[name] = dict(kind=m['kind'])
        for tag in ('train', 'held'):
            a, lens = m[tag]['start'], np.array(m[tag]['lens'])
            mine = slice(a, a + lens.sum())
            out.append(table[ids[mine]][np.arange(table.shape[1]) < n[mine][:, None]])
            edges = np.concatenate(([0], n[mine].cumsum()))[np.concatenate(([0], lens.cumsum()))]
            new[name][tag] = dict(start=at, lens=np.diff(edges).tolist())
            at += len(out[-1])
    return np.concatenate(out), new


def load_corpus():
    meta = json.load(open(BUILD + '/corpus.json'))
    if os.path.exists(BUILD + '/corpus.bin'):
        ids = np.fromfile(BUILD + '/corpus.bin', dtype=np.uint16)
    else:                                           # low and high bytes apart pack better
        raw = np.frombuffer(lzma.open(BUILD + '/corpus.xz').read(), dtype=np.uint8)
        ids = raw[:len(raw) // 2].astype(np.uint16) | (raw[len(raw) // 2:].astype(np.uint16) << 8)
    return come_apart(ids, meta) if CHAT is DeepSeek else (ids, meta)


class Rows:
    """Rows of tokens with a loss weight per token (the weight of predicting it)."""

    def __init__(self, seed, ids, meta, tag='train', heldout=False):
        from tokenizers import Tokenizer
        self.r = random.Random(seed)
        self.ids = ids
        self.tok = Tokenizer.from_file(BUILD + '/' + CHAT.tokenizer)
        vocab = [self.tok.id_to_token(i) for i in range(self.tok.get_vocab_size())]
        one = self.tok.token_to_id
        self.begin, self.close, self.again = ([one(s) for s in names] for names in (CHAT.begin, CHAT.close, CHAT.again))
        self.system, self.user, self.assistant, self.text_end, self.think, self.answer = (one(s) for s in (CHAT.system, CHAT.user, CHAT.assistant, CHAT.text_end, '<think>', '</think>'))
        clean = [t.replace('Ġ', ' ') for t in vocab if t.replace('Ġ', '').isascii() and t.replace('Ġ', '').isalnum() and not t.startswith('<')]
        self.tasks = T_.Tasks(self.r, json.load(open(BUILD + '/facts.json')), heldout, clean)
        self.stop = np.array([t.endswith('.') or t.endswith('Ċ') for t in vocab])
        self.pieces = {}                            # source -> [(start, length)], in reading order
        for name, m in meta.items():
            at, out = m[tag]['start'], []
            for n in m[tag]['lens']:
                out.append((at, n))
                at += n
            self.pieces[name] = out
        self.flat = [(name, i) for name, ps in self.pieces.items() for i in range(len(ps))]
        self.order, self.waiting = [], collections.deque()

    def next_piece(self):
        """Every piece once before any comes again."""
        if not self.order:
            self.order = self.flat[:]
            self.r.shuffle(self.order)
        return self.order.pop()

    def text(self, n):
        """At least n tokens of text: a piece and those that follow it in its source."""
        name, i = self.next_piece()
        ps, out, have = self.pieces[name], [], 0
        while have < n:
            a, m = ps[i % len(ps)]
            out.append(self.ids[a:a + m])
            have += m
            i += 1
        return np.concatenate(out)[:n].tolist()

    # -- dialogues

    def encode(self, dialogues):
        """Dialogues -> [(ids, weights)]; the end of an answer is learned with it."""
        systems = [(CHAT.effort if CHAT.effort and d['turns'][-1][1] else '') + d['system'] for d in dialogues]
        strings = [x for d, system in zip(dialogues, systems) for x in [system] + [x for q, t, a, _ in d['turns'] for x in (q, t, a)] if x]
        enc = iter([e.ids for e in self.tok.encode_batch_fast(strings, add_special_tokens=False)])
        out = []
        for d, system in zip(dialogues, systems):
            ids = self.begin + ([self.system] + next(enc) if system else []) + [self.user]
            w = [0] * len(ids)
            for i, (q, t, a, weight) in enumerate(d['turns']):
                e = (self.again if i else []) + next(enc) + [self.assistant]
                ids += e
                w += [0] * len(e)
                if t:
                    e = next(enc)
                    ids += [self.think] + e
                    w += [0] + [1] * (len(e) + 1)
                else:
                    w.append(0)
                e = next(enc) + self.close
                ids += [self.answer] + e
                w += [weight] * len(e)
            out.append((ids, w))
        return out

    def dialogue(self):
        if not self.waiting:
            self.waiting.extend(self.encode([self.tasks.dialogue() for _ in range(64)]))
        return self.waiting.popleft()

    # -- long texts with planted facts

    def haystack(self, n):
        """(tokens, do they count in the loss).  Mostly text from the corpus; sometimes stories, filler or noise, so that finding does not depend on what surrounds the key."""
        x = self.r.random()
        if x < 0.72:
            return self.text(n), self.r.random() < 0.45
        t, parts, size = self.tasks, [], 0
        few = [t.filler() for _ in range(3)]
        while size < n * 5:
            if x < 0.82:
                p = '\n\n' + t.story()['text']
            elif x < 0.89:
                p = ' ' + t.filler()
            elif x < 0.93:
                p = ' ' + t.pick(few)
            elif x < 0.97:
                p = ' ' + ' '.join(t.word() for _ in range(t.n(5, 15))) + '.'
            else:
                p = ' ' + t.filler() + ' ' + t.strange() + ' ' + str(t.n(0, 99999)) + '.'
            parts.append(p)
            size += len(p)
        parts[0] = parts[0].strip()
        return [i for e in self.tok.encode_batch_fast(parts, add_special_tokens=False) for i in e.ids][:n], False      # part by part: one long string takes seconds

    def key_document(self, length, keys=None, questions=None):
        """One dialogue of about `length` tokens over a text with planted facts; follow-up questions in further turns."""
        r = self.r
        keys = keys or (r.choice((1, 1, 2, 3, 4)) if length < 3000 else r.choice((1, 2, 4, 6, 8, 12, 16)))
        questions = questions or (min(keys, 3) if length < 3000 else keys)
        used = set()
        facts = [self.tasks.fact(used) for _ in range(keys)]
        ask = r.sample(facts, questions)
        lead = r.choice(('', '', '', 'Question: ', 'Answer this question about the text: '))
        strings = [' ' + f[0] for f in facts] + [x for f in ask for x in (lead + f[1], f[2])]
        enc = [e.ids for e in self.tok.encode_batch_fast(strings, add_special_tokens=False)]
        planted, qa = enc[:keys], enc[keys:]
        gap = self.tok.encode('\n\n', add_special_tokens=False).ids
        room = length - sum(map(len, enc)) - 4 * questions - 8
        hay, counts = self.haystack(max(room, 30))
        w = [1 if counts else 0] * len(hay)
        ends = np.flatnonzero(self.stop[np.array(hay)]) + 1
        spots = []
        for _ in range(keys):
            d = r.random() * len(hay)
            spots.append(int(ends[min(np.searchsorted(ends, d), len(ends) - 1)]) if len(ends) else int(d))
        for at, p in sorted(zip(spots, planted), reverse=True):
            hay[at:at] = p
            w[at:at] = [0] * len(p)
        ids = self.begin + [self.user]
        ws = [0] * len(ids)
        if r.random() < 0.12:                       # the question first
            ids += qa[0] + gap + hay
            ws += [0] * (len(qa[0]) + len(gap)) + w
        else:
            ids += hay + gap + qa[0]
            ws += w + [0] * (len(gap) + len(qa[0]))
        for i in range(questions):
            if i:
                ids += self.again + qa[2 * i]
                ws += [0] * len(self.again + qa[2 * i])
            ids += [self.assistant, self.answer] + qa[2 * i + 1] + self.close
            ws += [0, 0] + [3] * len(qa[2 * i + 1] + self.close)
        return ids, ws

    def text_document(self, n):
        ids = self.begin[:] if self.r.random() < 0.6 else []                    # a text may also come without the prefix
        w = [0] * len(ids)
        while len(ids) < n:
            name, i = self.next_piece()
            a, m = self.pieces[name][i]
            ids += self.ids[a:a + m].tolist() + [self.text_end]
            w += [1] * (m + 1)
        return ids, w

    # -- rows

    def row(self, phase):
        n, x = (SHORT if phase in 'AE' else LONG) + 1, self.r.random()
        ids, w = [], []

        def put(d):
            ids.extend(d[0])
            w.extend(d[1])
        if phase in 'AE':
            if x < 0.28:
                put(self.text_document(n))
            elif x < 0.38:
                put(self.key_document(self.r.choice((n, n, n // 2, n // 3))))
        else:
            one, two, many, text = (0.26, 0.36, 0.46, 0.72) if phase in 'BC' else (0.18, 0.26, 0.34, 0.58)      # D: the end of C, with more dialogues
            if x < one:
                put(self.key_document(self.r.randint(n * 92 // 100, n - 1)))
            elif x < two:
                put(self.key_document(self.r.randint(n * 36 // 100, n * 54 // 100)))
                put(self.key_document(n - len(ids)))
            elif x < many:
                while len(ids) < n - 300:
                    put(self.key_document(min(n - len(ids), self.r.choice((300, 500, 800, 1000, 1300, 2000)))))
            elif x < text:
                put(self.text_document(n))
        while len(ids) < n:
            put(self.dialogue())
        return np.array(ids[:n], dtype=np.uint16), np.array(w[:n], dtype=np.uint8)


def worker(seed, ids, meta, queues, phase):
    os.environ['TOKENIZERS_PARALLELISM'] = 'false'
    os.nice(1)
    rows = Rows(seed, ids, meta)
    while True:
        now = phase.value
        if now < 0:
            return
        p = chr(now)
        later = {'A': 'B', 'B': 'C', 'C': 'D', 'D': 'E', 'E': 'E'}[p]
        q = queues[p]
        if q.qsize() > 300 and queues[later].qsize() < 150:
            p, q = later, queues[later]
        made = [rows.row(p) for _ in range(11 if p in 'AE' else 1)]
        item = (np.stack([m[0] for m in made]), np.stack([m[1] for m in made]))
        while phase.value >= 0:
            try:
                q.put(item, timeout=1)
                break
            except queue.Full:
                if chr(phase.value) != p and chr(phase.value) > p:
                    break


# ---- optimizer

class Muon:
    """Momentum, then the nearest orthogonal matrix by five Newton-Schulz steps; every expert is its own matrix, equal shapes go together."""

    def __init__(self, matrices, decay=0.1):
        import torch
        self.torch, self.decay, self.groups = torch, decay, {}
        for p, shape in matrices:
            self.groups.setdefault(shape[-2:], []).append((p, shape))
        self.momentum = {p: torch.zeros_like(p) for p, _ in matrices}

    def step(self, lr):
        with self.torch.no_grad():
            self._step(lr)

    def _step(self, lr):
        torch = self.torch
        for (r, c), group in self.groups.items():
            ps, gs = [p for p, _ in group], [p.grad for p, _ in group]
            ms = [self.momentum[p] for p in ps]
            torch._foreach_mul_(ms, 0.95)
            torch._foreach_add_(ms, gs)
            us = torch._foreach_add(gs, ms, alpha=0.95)
            x = torch.cat([u.reshape(-1, r, c) for u in us])
            x = x.bfloat16() if x.is_cuda else x
            flip = r > c
            if flip:
                x = x.mT
            x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
            for _ in range(5):
                a = x @ x.mT
                b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)
                x = torch.baddbmm(x, b, x, beta=3.4445)
            if flip:
                x = x.mT
            parts = x.float().split([p.numel() // (r * c) for p in ps])
            torch._foreach_mul_(ps, 1 - lr * self.decay)
            torch._foreach_add_(ps, [q.reshape(p.shape) for p, q in zip(ps, parts)], alpha=-lr * 0.2 * max(r, c) ** 0.5)


def sort_parameters(model):
    if CHAT is DeepSeek:
        return model.sorted_parameters()
    muon, adam, index = [], [model.embed, model.norm], []
    for b in model.blocks:
        index += b.indexer_parameters()
        for name, p in b.named_parameters():
            if any(p is q for q in b.indexer_parameters()):
                continue
            if p.dim() == 1 or name == 'router':
                adam.append(p)
            elif name == 'gate_up' and not b.moe:
                muon.append((p, (2, p.shape[0] // 2, p.shape[1])))
            else:
                muon.append((p, tuple(p.shape)))
    return muon, adam, index, []


# ---- checks during training

def exact(model, torch, rows, docs, T, sparse, batch):
    """Share of dialogues whose every exact token (weight 2 or more) is the argmax, given the right ones before it: greedy decoding would give the same answer."""
    good = []
    for i in range(0, len(docs), batch):
        part = docs[i:i + batch]
        ids = torch.zeros(batch, T, dtype=torch.long)
        need = torch.zeros(batch, T, dtype=torch.bool)
        for j, (a, w) in enumerate(part):
            a, w = a[:T], w[:T]
            ids[j, :len(a)] = torch.tensor(a)
            need[j, :len(a)] = torch.tensor(w) >= 2
        ids, need = ids.to(model.embed.device), need.to(model.embed.device)
        x = run(model, ids, sparse).view(batch, T, -1)
        for j in range(len(part)):
            at = need[j].nonzero()[:, 0]
            good.append(bool((model.logits(x[j, at - 1]).argmax(-1) == ids[j, at]).all()))
    return good


def run(model, ids, sparse):
    """Compiled pieces are those of training, which record what a backward pass needs."""
    import torch
    with torch.set_grad_enabled(model.compiled):
        x, _, _ = model(ids, sparse=sparse)
    return x.detach()


def perplexity(model, torch, ids, sparse, batch):
    """ids [rows, T + 1] numpy -> mean loss over all positions."""
    total = n = 0
    for i in range(0, len(ids) // batch * batch if model.compiled else len(ids), batch):
        t = torch.tensor(ids[i:i + batch].astype(np.int64)).to(model.embed.device)
        x = run(model, t[:, :-1].contiguous(), sparse)
        for xs, ts in zip(x.split(8192), t[:, 1:].reshape(-1).split(8192)):
            total += torch.nn.functional.cross_entropy(model.logits(xs), ts, reduction='sum').item()
        n += t[:, 1:].numel()
    return total / n


def checks(state, ids, meta, log, sparse, full=True, n=300):
    """Everything on held-out data, with the uncompiled model and the weights rounded to bf16; of v41, which is rounded already, the compiled one
    in the shapes of training."""
    import torch
    import model as M
    t0, m = time.time(), state
    if CHAT is GLM:
        m = M.Mini(state.c).to(state.embed.device)
        m.load_state_dict({k: v.detach().bfloat16().float() if v.is_floating_point() else v for k, v in state.state_dict().items()})
    held = Rows(4711, ids, meta, 'held', heldout=True)
    g, out = held.tasks, {}
    with torch.no_grad():
        one = lambda turns: dict(kind='', system='', turns=[(q, None, a, w) for q, t, a, w in (turns['turns'] if isinstance(turns, dict) else turns)[:1]])
        kinds = dict(addition=g.addition, copying=g.copying, reversing=g.reversing, sorting=g.sorting, lookups=g.lookups, small=g.small, quiz=g.quiz)
        for name, f in kinds.items():
            ds = []
            while len(ds) < (n if name in ('addition', 'copying') else n // 3):
                d = one(f())
                if d['turns'][0][3] >= 2:
                    ds.append(d)
            r = exact(m, torch, held, held.encode(ds), SHORT, sparse, B_SHORT)
            out[name] = round(100 * sum(r) / len(r), 2)
            if name == 'copying':
                bad = [d['turns'][0][2] for d, ok in zip(ds, r) if not ok]
                log('copy misses: %s' % bad[:8])
        for L in ((1024, 4096, 8192) if full else (8192,)):
            k = 100 if L == 8192 and full else 40
            docs = [held.key_document(L, keys=1, questions=1) for _ in range(k)]
            T = LONG if L == 8192 else L + 128
            for mode in ((False, True) if L == 8192 else (sparse,)):
                r = exact(m, torch, held, docs, T, mode, B_LONG if CHAT is DeepSeek else max(1, 65536 // T // 2))
                out['key %d %s' % (L, 'sparse' if mode else 'dense')] = round(100 * sum(r) / len(r), 1)
        if full:
            for kind in ('prose', 'tech'):
                stream = np.concatenate([ids[a:a + b] for name in meta if meta[name]['kind'] == kind for a, b in held.pieces[name]])
                rows = stream[:len(stream) // 4097 * 4097].reshape(-1, 4097)
                rows = rows[:: max(1, len(rows) // 32)][:32].copy()
                rows[:, :len(held.begin)] = held.begin
                d, s = perplexity(m, torch, rows, False, 8), perplexity(m, torch, rows, True, 8)
                out['ppl4k ' + kind] = '%.3f -> %.3f (%+.2f%%, %d rows)' % (math.exp(d), math.exp(s), 100 * (math.exp(s - d) - 1), len(rows))
            seen = Rows(1, ids, meta, 'train')
            for name in meta:
                v = []
                for r in (seen, held):
                    stream = np.concatenate([ids[a:a + b] for a, b in r.pieces[name]])
                    rows = stream[:len(stream) // 1025 * 1025].reshape(-1, 1025)
                    rows = rows[:: max(1, len(rows) // 33)][:33].copy()
                    rows[:, :len(held.begin)] = held.begin
                    v.append(perplexity(m, torch, rows, sparse, 33))
                out['ppl ' + name] = '%.2f / %.2f = %.2f' % (math.exp(v[1]), math.exp(v[0]), math.exp(v[1] - v[0]))
    log('checks (%s, %.1f s): %s' % ('sparse' if sparse else 'dense', time.time() - t0, json.dumps(out)))
    M._scores.clear()
    del m
    torch.cuda.empty_cache() if torch.cuda.is_available() else None
    return out


def own_rows(net, rows, torch, log, batch, most):
    """What the model itself says to first questions and behind beginnings of text, half of it at temperature 0, packed like rows of training: [ids, weights]."""
    import polish
    ids, weights, t0 = [], [], time.time()
    temperature = torch.tensor([0.7, 1e-4]).repeat(batch // 2).to(net.embed.device)
    texts = [p for length in (12, 30, 60, 90) for p in polish.prefixes(rows, batch // 4, length, rows.r)]
    for prompts, n in ((polish.questions(rows, batch), most // 2), (texts, most)):
        for p, g in zip(prompts, polish.sample(net, prompts, n, temperature)):
            g = g[:g.index(rows.text_end) + 1] if rows.text_end in g else g
            ids += p + g
            weights += [0] * len(p) + [1] * len(g)
    n = len(ids) // (SHORT + 1)
    log('%d rows of its own answers, %.1f s' % (n, time.time() - t0))
    return [torch.tensor(x[:n * (SHORT + 1)], device=net.embed.device).view(n, -1) for x in (ids, weights)]


# ---- the run

def save_weights(model, folder):
    """bf16 but for what is stored in F32, in pieces that fit through a narrow door."""
    from safetensors.torch import save_file
    import torch
    parts, size = [{}], 0
    for k, v in model.state_dict().items():
        v = v.detach().cpu()
        v = v.float() if k.endswith(('bias', 'sink', '.fn', '.base', '.scale')) else v.bfloat16()
        n = v.numel() * v.element_size()
        if size + n > 15_000_000:
            parts.append({})
            size = 0
        parts[-1][k] = v.contiguous()
        size += n
    for i, p in enumerate(parts):
        save_file(p, '%s/mini-%d.safetensors' % (folder, i))


def load_weights(model, folder):
    import glob
    from safetensors.torch import load_file
    sd = {}
    for f in sorted(glob.glob(folder + '/mini-*.safetensors')):
        sd.update(load_file(f))
    model.load_state_dict({k: v.float() for k, v in sd.items()})


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument('--out', required=True)
    ap.add_argument('--wall', type=float, default=570, help='seconds after which the process has ended, checks and saving included')
    ap.add_argument('--total', type=float, default=1050, help='training clock at which the learning rate reaches zero')
    ap.add_argument('--a', type=float, default=380, help='clock at which phase A ends')
    ap.add_argument('--b', type=float, default=520, help='clock at which phase B ends')
    ap.add_argument('--c', type=float, default=0, help='with --v41: clock at which the model is finished and its drafter begins')
    ap.add_argument('--v41', action='store_true', help='weights/mini-v41')
    ap.add_argument('--resume', default='')
    ap.add_argument('--init', default='')
    ap.add_argument('--clock', type=float, default=0, help='with --init: where on the clock to begin')
    ap.add_argument('--checkpoint', default='/tmp/mini.pt')
    ap.add_argument('--workers', type=int, default=14)
    ap.add_argument('--seed', type=int, default=1)
    ap.add_argument('--smoke', action='store_true', help='a few steps of every phase, with the kernels compared to plain PyTorch')
    ap.add_argument('--tiny', action='store_true', help='the same path on a CPU, at toy size')
    args = ap.parse_args()
    began = time.time()
    global SHORT, LONG, B_SHORT, B_LONG, CHAT
    args.c = args.c or args.total
    if args.v41:
        CHAT = DeepSeek
    if args.tiny:
        SHORT, LONG, B_SHORT, B_LONG = 128, 512, 4, 2
    os.makedirs(args.out, exist_ok=True)
    logfile = open(args.out + '/train.log', 'a')

    def log(s):
        line = '%7.1f %s' % (time.time() - began, s)
        print(line, flush=True)
        logfile.write(line + '\n')
        logfile.flush()
    ids, meta = load_corpus()
    phase = mp.Value('i', ord('A' if args.clock < args.a else 'C' if args.clock < args.c else 'E'))
    queues = {p: mp.Queue(400) for p in 'ABCDE'}
    procs = [mp.Process(target=worker, args=(1000 * args.seed + i + int(args.clock) * 100, ids, meta, queues, phase), daemon=True) for i in range(args.workers)]
    for p in procs:
        p.start()
    import torch
    import model
    import model_v41
    M = model_v41 if args.v41 else model
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision('high')
    gpu = torch.cuda.is_available()
    dev = 'cuda' if gpu else 'cpu'
    model.LOW = gpu
    if gpu:
        import torch._dynamo
        torch._dynamo.config.cache_size_limit = 64
    small = {}
    if args.tiny:
        small = dict(hidden=64, q_lora=32, inner=32, topk=32) if args.v41 else dict(hidden=64, q_lora=32, kv_lora=32, dense_inner=64, inner=32, topk=32)
    if args.v41:
        from tokenizers import Tokenizer
        mapping, known = M.token_map(Tokenizer.from_file(BUILD + '/' + CHAT.tokenizer), M.Config.vocab)
        c = M.Config(engram_known=known, **small)
        net = M.Mini(c, mapping, compiled=gpu).to(dev)
        rounding = M.Rounding(net.stored(), net.parameters())
    else:
        c = M.Config(**small)
        net = M.Mini(c, compiled=gpu).to(dev)
        rounding = None
    if args.init:
        load_weights(net, args.init)
    log('%d parameters, %d corpus tokens, %d workers, %s' % (sum(p.numel() for p in net.parameters()), len(ids), args.workers, torch.cuda.get_device_name() if gpu else 'cpu'))

    def optimizers(model):
        matrices, plain, index, small = sort_parameters(model)
        adam = torch.optim.AdamW([dict(params=ps, lr=lr, base=lr) for ps, lr in ((plain, 3e-3), (index, 2e-3), (small, 3e-4)) if ps], betas=(0.9, 0.95), weight_decay=0.0, fused=gpu)
        return Muon(matrices), adam, matrices, index
    sets = [optimizers(net)] + ([optimizers(net.draft)] if args.v41 else [])
    clock, step, used, own = args.clock, 0, collections.Counter(), []
    if args.resume and os.path.exists(args.resume):
        ck = torch.load(args.resume, map_location=dev)
        net.load_state_dict(ck['model'])
        for (muon, adam, matrices, _), a, m in zip(sets, ck['adam'], ck['muon']):
            adam.load_state_dict(a)
            for (p, _), x in zip(matrices, m):
                muon.momentum[p].copy_(x)
        clock, step = ck['clock'], ck['step']
        log('resumed at clock %.1f, step %d' % (clock, step))
    elif args.v41 and gpu and not args.init:
        M.compare_kernels(net, B_SHORT, SHORT, log)

    def save():
        torch.save(dict(model=net.state_dict(), adam=[x[1].state_dict() for x in sets], muon=[[x[0].momentum[p] for p, _ in x[2]] for x in sets], clock=clock, step=step), args.checkpoint)
        with rounded('B'):
            save_weights(net, args.out)

    @contextlib.contextmanager
    def rounded(p):
        """The values that will be stored, while a gradient is taken or the model looked at; not in phase A, and of v41 only."""
        if rounding and p != 'A':
            rounding.enter()
        yield
        if rounding and p != 'A':
            rounding.leave()

    def phase_at(t):
        d = args.b + 0.72 * (args.c - args.b)
        return 'A' if t < args.a else 'B' if t < args.b else 'C' if t < d else 'D' if t < args.c else 'E'

    def lr_at(t, step):
        if t < args.a:
            return min(1.0, (step + 1) / 150)
        if t >= args.c:
            return (0.5 if args.init else 1.0) * min(1.0, (t - args.c) / 3 + 0.01, 1.5 * max(0.0, (args.total - t) / (args.total - args.c)))
        start = args.b + 0.35 * (args.c - args.b)
        return 0.75 if t < start else 0.75 * max(0.0, (args.c - t) / (args.c - start))

    # feeder: batches wait on the GPU before they are needed
    ready, stop = queue.Queue(6), threading.Event()
    stock, reused = {p: collections.deque(maxlen=500) for p in 'ABCDE'}, [0, 0]

    def feed():
        r = random.Random(5)
        while not stop.is_set():
            p = chr(phase.value)
            rows = B_LONG if p in 'BCD' else B_SHORT if p == 'A' else B_SHORT // 2     # the other half of E's are the model's own answers
            slabs, need = [], max(1, rows // 11) if p in 'AE' else rows
            while len(slabs) < need and not stop.is_set():
                try:
                    s = queues[p].get(timeout=0.02 if len(stock[p]) > 200 else 0.5)
                    stock[p].append(s)
                    reused[0] += 1
                    slabs.append(s)
                except queue.Empty:
                    if len(stock[p]) > 200:
                        reused[1] += 1
                        slabs.append(stock[p][r.randrange(len(stock[p]))])
                if chr(phase.value) != p:
                    break
            if len(slabs) < need:
                continue
            a = torch.from_numpy(np.concatenate([s[0] for s in slabs]).astype(np.int64))
            w = torch.from_numpy(np.concatenate([s[1] for s in slabs]))
            if p in 'AE' and args.tiny:
                a, w = a[:rows], w[:rows]
            if gpu:
                a, w = a.pin_memory().to(dev, non_blocking=True), w.pin_memory().to(dev, non_blocking=True)
            while not stop.is_set():
                try:
                    ready.put((p, a, w), timeout=0.5)
                    break
                except queue.Full:
                    pass
    phase.value = ord(phase_at(clock))
    feeder = threading.Thread(target=feed, daemon=True)
    feeder.start()

    def one_step(p, a, w, lr):
        x_in, targets, weights = a[:, :-1].contiguous(), a[:, 1:].reshape(-1), w[:, 1:].reshape(-1)
        B, T = x_in.shape
        pos = None
        if p != 'A':                                # 64 positions anywhere and 64 where the questions stand
            n = 64 if T > 1000 else 16
            pos = torch.cat((torch.randint(0, T, (B, n), device=dev), torch.randint(T - T // 20, T, (B, n), device=dev)), 1)
        with rounded(p):
            x, loads, kls = net(x_in, sparse=p in 'CD', kl_pos=pos)
            lm = net.loss(x, targets, weights)
            kl = sum(kls) if kls else torch.zeros((), device=dev)
            (lm + kl).backward()
        update(0, lr, bool(kls))
        balance([b for b in net.blocks if b.moe], loads, c.top / c.experts)
        return lm.detach(), kl.detach(), torch.stack(loads).detach() * c.experts / c.top

    def update(which, lr, indexers):
        muon, adam, matrices, index = sets[which]
        muon.step(5e-3 * lr)
        for g in adam.param_groups:
            g['lr'] = g['base'] * (max(lr, 0.05) if g['base'] == 2e-3 else lr)
        if not indexers:                            # no gradient, no step for the indexers
            for q in index:
                q.grad = None
        adam.step()
        adam.zero_grad(set_to_none=True)
        for q, _ in matrices:
            q.grad = None

    @torch.no_grad()
    def balance(blocks, loads, even):
        for b, load in zip(blocks, loads):
            b.bias += 1e-3 * torch.sign(even - load)

    def draft_step(p, a, w, lr, anchors=48):
        """The finished model reads, in half of the rows its own answers, then the drafter guesses the block after some of its positions, mostly in what it would say itself."""
        if not own:
            with rounded(p):
                own.extend(own_rows(net, Rows(777, ids, meta), torch, log, *((4096, 224) if gpu else (8, 64))))
        i = torch.randint(0, len(own[0]), (B_SHORT - len(a),), device=dev)
        a, w = torch.cat((a, own[0][i])), torch.cat((w, own[1][i]))
        x_in, (B, T) = a[:, :-1].contiguous(), a[:, :-1].shape
        taps, n = [], c.block
        with rounded(p):
            at = torch.multinomial((w[:, 1:T - n] > 0).float() + 0.03, min(anchors, T // 8)) + 1
            place = ((at + torch.arange(B, device=dev)[:, None] * T)[..., None] + torch.arange(n, device=dev)).view(-1)
            far = torch.exp(-torch.arange(n, device=dev) / 4).repeat(at.numel())
            with torch.no_grad():
                y, _, _ = net(x_in, sparse=True, hidden_taps=taps)
                th = net.normed(y)[place]
            y, loads = net.draft(net, torch.cat(taps, -1), x_in, at)
            loss, hit = net.draft.loss(net, y, th, x_in.view(-1)[place], far)
            loss.backward()
        update(1, lr, False)
        balance(net.draft.stages, loads, c.draft_top / c.draft_experts)
        hit = hit.view(-1, n).cumprod(-1).mean(0).detach()                      # given the text before each place
        return loss.detach(), hit.sum(), torch.stack(loads).detach() * c.draft_experts / c.draft_top

    if args.smoke:
        smoke(args, net, one_step, draft_step, phase, ready, log, torch, M, dev, gpu)
        save()
        if not args.v41:
            checks(net, ids, meta, log, True, full=True, n=66 if gpu else 8)
        stop.set()
        phase.value = -1
        return
    window, t_last, since, saved = [], time.time(), 0.0, time.time()
    reserve = 30 if gpu else 60
    while clock < args.total and time.time() - began < args.wall - reserve:
        p = phase_at(clock)
        phase.value = ord(p)
        q, a, w = ready.get()
        if q != p:
            continue
        if p == 'E' and used['E'] == 1:             # compiled, the drafter has what time is left
            save()
            args.total = clock + args.wall - reserve - (time.time() - began)
        lr = lr_at(clock, step)
        lm, kl, load = (draft_step if p == 'E' else one_step)(p, a, w, lr)
        used[p] += 1
        window.append((lm, kl))
        step += 1
        if step % 20 == 0 or not gpu:
            lm.item()                               # wait for the GPU, so that the clock is true
            now = time.time()
            clock += min(now - t_last, 3.0)         # a compilation counts as three seconds at most
            since += now - t_last
            t_last = now
            if now - saved > 90:                    # whatever ends the process, little is lost
                save()
                saved = t_last = time.time()
            if step % 100 == 0 or not gpu:
                k = len(window)
                tok = k * (B_SHORT * SHORT if p in 'AE' else B_LONG * LONG)
                log('step %5d clock %6.1f %s lr %.3f lm %.4f kl %.4f load %.2f  %.0f tok/s, reused %.1f%%' % (step, clock, p, lr, sum(x[0].item() for x in window) / k, sum(x[1].item() for x in window) / k,
                    load.max().item(), tok / since, 100 * reused[1] / max(1, sum(reused))))
                window, since = [], 0.0
    stop.set()
    phase.value = -1
    log('stopped at clock %.1f, step %d; steps by phase %s; peak memory %.1f GB' % (clock, step, dict(used), torch.cuda.max_memory_allocated() / 1e9 if gpu else 0))
    save()
    log('saved')
    for q in procs:
        q.terminate()
    with rounded('B'):
        checks(net, ids, meta, log, clock > args.b, full=not args.v41, n=132 if args.v41 else 300)


def smoke(args, net, one_step, draft_step, phase, ready, log, torch, M, dev, gpu):
    """Each phase compiles and runs; speed; kernels against plain PyTorch."""
    if gpu and not args.v41:
        g = torch.Generator(device=dev).manual_seed(3)
        B, T = 2, 1000
        qi, w, ki = (torch.randn(B, T, 8, 64, device=dev, generator=g).bfloat16(), torch.randn(B, T, 8, device=dev, generator=g), torch.randn(B, T, 64, device=dev, generator=g).bfloat16())
        qi[:, :, :, ::2] = 0
        a, b = torch.empty(B, T, T, dtype=torch.bool, device=dev), torch.empty(B, T, T, dtype=torch.bool, device=dev)
        M.select_triton(qi, w, ki, a, 128)
        M.select_torch(qi, w, ki, b, 128)
        log('selection: %d of %d entries differ, rows of %d..%d keys, causal %s' % ((a != b).sum().item(), b.sum().item(), a.sum(-1)[:, 127:].min().item(), a.sum(-1).max().item(), not bool(a.triu(1).any())))
        m = torch.rand(2, 1024, 1024, device=dev) < 0.2
        m |= torch.eye(1024, dtype=torch.bool, device=dev)
        m = m.tril()
        q, k, v = (torch.randn(2, 1024, 8, d, device=dev, generator=g).bfloat16().requires_grad_() for d in (64, 64, 32))
        dy = torch.randn(2, 1024, 8, 32, device=dev, generator=g).bfloat16()
        outs = []
        for blocks in (M.flex_blocks(m), None):
            y = M.attend(q, k, v, m, blocks)
            outs.append([y] + list(torch.autograd.grad(y, (q, k, v), dy)))
        log('flex against masked attention, relative errors: %s' % ['%.1e' % ((x - y).float().norm() / y.float().norm()).item() for x, y in zip(*outs)])
    for p in 'ABCE' if args.v41 else 'ABCD':
        phase.value = ord(p)
        t0, n, times = time.time(), 0, []
        while n < (16 if gpu else 2):
            q, a, w = ready.get()
            if q != p:
                continue
            t1 = time.time()
            lm, kl, load = (draft_step if p == 'E' else one_step)(p, a, w, 0.3)
            v = lm.item()
            times.append(time.time() - t1)
            n += 1
        log('smoke %s: lm %.3f kl %.3f, first step %.1f s, then %.1f ms, data wait %.1f s, memory %.1f GB' % (p, v, kl.item(), times[0], 1000 * sorted(times[1:])[len(times) // 2 - 1], time.time() - t0 - sum(times),
            torch.cuda.max_memory_allocated() / 1e9 if gpu else 0))


if __name__ == '__main__':
    try:
        main()
        code = 0
    except BaseException:                           # whatever happens, end: the workers and queues would keep the process waiting
        import traceback
        traceback.print_exc()
        code = 1
    for child in mp.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
