#!/usr/bin/env python3
"""Evaluation of weights/mini through tide itself: makes the prompt files, scores what tide answers.

    python3 evaluate.py make FOLDER [--seed 20261129] [--sample 120000] [--v41]       (for weights/mini-v41) needs build/facts.json and build/text (corpus.py), or in place of the text the packed tokens; FOLDER then holds
        addition.jsonl copying.jsonl keys8192.jsonl loops.jsonl reversing.jsonl ... and text/SOURCE.{held,train}.txt, text/{prose,tech}.held.txt
    tide batch -m weights/mini FOLDER/addition.jsonl -o FOLDER/addition.out.jsonl --slots 8           (and so on, see README.md)
    tide eval  -m weights/mini -f FOLDER/text/novels.held.txt --ppl -c 4096 > FOLDER/text/novels.held.json
    python3 evaluate.py score FOLDER                         prints one line per bar

Each row of a prompt file says what tide is to do; a file NAME.answers.jsonl beside it keeps the right answers, row by row.  Everything
is drawn with a seed of its own from what training never sees: addends and words held out by hash (tasks.py), pieces of text held out
by hash (corpus.py); of each source there is a sample of so many characters.  Copying is measured on lists, words, sentences, digits, letters and mixed strings, not on random pieces of
tokens, which training also uses.  A loop is a run of ten tokens that comes three times or more in one answer.
"""
import functools, glob, json, os, random, re, sys
import tasks

HERE = os.path.dirname(os.path.abspath(__file__))
BUILD = os.environ.get('TIDE_BUILD', os.path.join(HERE, 'build'))


def chat(text, n, **more):
    return dict({'messages': [{'role': 'user', 'content': text}], 'n': n, 'temp': 0}, **more)


def write(folder, name, rows):
    """rows: (row for tide, answer or kind)"""
    with open('%s/%s.jsonl' % (folder, name), 'w') as f, open('%s/%s.answers.jsonl' % (folder, name), 'w') as g:
        for row, answer in rows:
            f.write(json.dumps(row, ensure_ascii=False) + '\n')
            g.write(json.dumps(answer, ensure_ascii=False) + '\n')
    print('%-14s %4d rows' % (name, len(rows)))


def held_text(kind=None, tag='held'):
    import corpus
    names = [n for n, (k, _, _) in corpus.SOURCES.items() if kind in (None, k)]
    if os.path.isdir(BUILD + '/text'):
        return {n: corpus.read(n, tag) for n in names}
    return {n: unpacked(n, tag) for n in names}


@functools.cache
def packed():
    import train
    from tokenizers import Tokenizer
    return train.load_corpus() + (Tokenizer.from_file(BUILD + '/tokenizer.json'),)


@functools.cache
def unpacked(name, tag, most=4000):
    """Every so many pieces of a source."""
    ids, meta, tok = packed()
    at, lens = meta[name][tag]['start'], meta[name][tag]['lens']
    starts = [at + sum(lens[:i]) for i in range(0, len(lens), -(-len(lens) // most))]
    return tok.decode_batch([ids[a:a + n].tolist() for a, n in zip(starts, lens[::-(-len(lens) // most)])])


def plant(g, r, encode, pieces, length):
    """One fact at a random depth of held-out text, the question at the end: about `length` tokens in all."""
    sentence, question, answer = g.fact(set())
    text, need = '', length - len(encode(sentence + question)) - 12
    i = r.randrange(len(pieces))
    while len(encode(text)) < need:
        text += ('\n\n' if text else '') + pieces[i % len(pieces)]
        i += 1
    low, high = 0, len(text)                                                     # the longest beginning that fits
    while high - low > 8:
        mid = (low + high) // 2
        low, high = (mid, high) if len(encode(text[:mid])) <= need else (low, mid)
    text = text[:low]
    ends = [m.end() for m in re.finditer(r'\.(?=\s)', text)] or [0]
    depth = r.random() * len(text)
    at = min(ends, key=lambda e: abs(e - depth))
    return text[:at] + ' ' + sentence + text[at:] + '\n\n' + question, answer


def make(folder, seed, model, sample):
    from tokenizers import Tokenizer
    tok = Tokenizer.from_file('%s/%s/tokenizer.json' % (HERE, model))
    encode = lambda s: tok.encode(s, add_special_tokens=False).ids
    os.makedirs(folder + '/text', exist_ok=True)
    r = random.Random(seed)
    g = tasks.Tasks(r, json.load(open(BUILD + '/facts.json')), heldout=True)

    def one(f, weight=2):
        while True:
            t = f()
            t = t['turns'] if isinstance(t, dict) else t
            if t[0][3] >= weight:
                return chat(t[0][0], 96), t[0][2]
    write(folder, 'addition', [one(g.addition) for _ in range(300)])
    write(folder, 'copying', [one(g.copying) for _ in range(300)])
    for name, n in (('reversing', 100), ('sorting', 100), ('lookups', 100), ('small', 100), ('quiz', 100)):
        write(folder, name, [one(g.named[name]) for _ in range(n)])
    everything = [p for ps in held_text().values() for p in ps if len(p) > 1500]
    write(folder, 'keys8192', [(lambda p: (chat(p[0], 48), p[1]))(plant(g, r, encode, everything, 8192)) for _ in range(100)])
    rows = []
    for kind in ('definitions', 'stories', 'prose', 'knowledge', 'talk', 'persona', 'packages', 'quiz', 'small', 'lookups', 'sums', 'copying', 'reversing', 'sorting'):
        for _ in range(10 if kind in ('definitions', 'stories', 'prose') else 4):
            d = g.dialogue(kind)
            m = ([{'role': 'system', 'content': d['system']}] if d['system'] else []) + [{'role': 'user', 'content': d['turns'][0][0]}]
            rows.append(({'messages': m, 'n': 300, 'temp': 0.7, 'seed': len(rows) + 1}, kind))
    for kind, n in (('prose', 16), ('tech', 10)):                                # plain text to be continued
        texts = held_text(kind)
        for i in range(n):
            name = list(texts)[i % len(texts)]
            p = r.choice([p for p in texts[name] if len(p) > 800])
            words = p[p.find('. ') + 2:].split(' ')[:r.randint(6, 20)]
            rows.append(({'prompt': ' '.join(words), 'n': 300, 'temp': 0.7, 'seed': len(rows) + 1}, 'text ' + name))
    write(folder, 'loops', rows)
    import corpus
    held, seen, kinds = held_text(), held_text(tag='train'), {}
    for name in held:                                                           # equal amounts, in an order that a hash gives, so that a beginning is a fair sample
        for tag, pieces in (('held', held[name]), ('train', seen[name])):
            text, size = [], 0
            for p in sorted(pieces, key=corpus.number):
                if size < sample:
                    text.append(p[:20000])
                    size += len(p[:20000])
            open('%s/text/%s.%s.txt' % (folder, name, tag), 'w').write('\n\n'.join(text))
            if tag == 'held':
                kinds.setdefault(corpus.SOURCES[name][0], []).append('\n\n'.join(text)[:40000])
    for k, v in kinds.items():
        open('%s/text/%s.held.txt' % (folder, k), 'w').write('\n\n'.join(v))


def loop(ids, n=10, times=3):
    seen = {}
    for i in range(len(ids) - n + 1):
        k = tuple(ids[i:i + n])
        seen[k] = seen.get(k, 0) + 1
        if seen[k] >= times:
            return True
    return False


def score(folder):
    from tokenizers import Tokenizer
    tok = Tokenizer.from_file(HERE + '/mini/tokenizer.json')
    load = lambda p: [json.loads(l) for l in open(p)]
    for f in sorted(glob.glob(folder + '/*.out.jsonl')):
        name = os.path.basename(f)[:-len('.out.jsonl')]
        out, want = load(f), load('%s/%s.answers.jsonl' % (folder, name))
        if name == 'loops':
            bad = [(o, w) for o, w in zip(out, want) if loop(tok.encode(o['text'], add_special_tokens=False).ids)]
            print('%-14s %d of %d answers loop (a run of ten tokens three times or more); %s' % (name, len(bad), len(out), ', '.join(w for _, w in bad)))
            continue
        good = [o['text'].strip() == w.strip() and o['finish_reason'] == 'stop' for o, w in zip(out, want)]
        print('%-14s %.1f%% exact (%d of %d)' % (name, 100 * sum(good) / len(good), sum(good), len(good)))
        for o, w, ok in list(zip(out, want, good)):
            if not ok and '-v' in sys.argv:
                print('     wanted %r\n        got %r (%s)' % (w[:100], o['text'][:100], o['finish_reason']))
    ppl = {os.path.basename(f)[:-5]: json.load(open(f))['perplexity'] for f in glob.glob(folder + '/text/*.json') if os.path.getsize(f)}
    for k in sorted(ppl):
        if k.endswith('.held') and k[:-5] + '.train' in ppl:
            print('%-14s perplexity held out %.2f, training %.2f, ratio %.2f' % (k[:-5], ppl[k], ppl[k[:-5] + '.train'], ppl[k] / ppl[k[:-5] + '.train']))
        if k.endswith('.dense') and k[:-6] in ppl:
            print('%-14s perplexity sparse %.3f, dense %.3f: %+.2f%%' % (k[:-11], ppl[k[:-6]], ppl[k], 100 * (ppl[k[:-6]] / ppl[k] - 1)))


if __name__ == '__main__':
    if sys.argv[1] == 'make':
        number = lambda option, usual: int(sys.argv[sys.argv.index(option) + 1]) if option in sys.argv else usual
        make(sys.argv[2], number('--seed', 20261129), 'mini-v41' if '--v41' in sys.argv else 'mini', number('--sample', 120000))
    else:
        score(sys.argv[2])
