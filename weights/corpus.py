#!/usr/bin/env python3
"""Text for training weights/mini, made from Debian packages.

    python3 corpus.py fetch       download and unpack the packages (apt, Debian 12; needs libsword-utils, mandoc, lz4)
    python3 corpus.py text        extract, clean, drop repeats, split off held-out pieces -> build/text/*.{train,held}.txt
    python3 corpus.py facts       word senses, quiz facts and package summaries for the dialogues -> build/facts.json
    python3 corpus.py tokenizer   train the byte-level BPE -> build/tokenizer.json
    python3 corpus.py pack        encode everything -> build/corpus.bin (uint16) and build/corpus.json (what lies where)
    python3 corpus.py squeeze     the same as build/corpus.xz, where it has to travel to the machine with the GPU

Only permissive or public-domain sources are used; README.md lists their licences.  A model of 20 million parameters
recites whatever it reads often, so the aim is many different bytes, each read only a few times.  The text is no part of
the repository: package descriptions, for one, have no licence of their own.
"""
import glob, gzip, hashlib, html, json, os, re, struct, subprocess, sys, zlib
from multiprocessing import Pool

HERE = os.path.dirname(os.path.abspath(__file__))
BUILD = os.environ.get('TIDE_BUILD', os.path.join(HERE, 'build'))
OUT = os.path.join(BUILD, 'out')                    # unpacked packages

# name: (kind, most bytes kept, packages).  A cap keeps one large reference manual from becoming the language the model speaks.
SOURCES = {
    'novels':      ('prose', 9e9, 'r-cran-janeaustenr'),
    'bible':       ('prose', 9e9, 'sword-text-web'),
    'commentary':  ('prose', 14e6, 'sword-comm-tdavid sword-comm-mhcc sword-comm-scofield'),
    'essays':      ('prose', 9e9, 'dict-devil jargon-text'),
    'glosses':     ('prose', 10e6, 'wordnet-base'),
    'packages':    ('prose', 9e9, ''),              # apt's long package descriptions
    'python':      ('tech', 12e6, 'python3.11-doc'),
    'sqlite':      ('tech', 6e6, 'sqlite3-doc'),
    'postgresql':  ('tech', 7e6, 'postgresql-doc-15'),
    'django':      ('tech', 7e6, 'python-django-doc python-djangorestframework-doc'),
    'apache':      ('tech', 9e6, 'apache2-doc tomcat10-docs ant-doc derby-doc fop-doc'),
    'rust':        ('tech', 5e6, 'rust-doc'),
    'nodejs':      ('tech', 4e6, 'nodejs-doc'),
    'shell':       ('tech', 5e6, 'abs-guide zsh-doc postfix-doc krb5-doc'),
    'sklearn':     ('tech', 5e6, 'python-sklearn-doc'),
    'science':     ('tech', 20e6, 'python-scipy-doc python-pandas-doc python-astropy-doc python-sympy-doc python-statsmodels-doc '
                                  'python-dask-doc python-xarray-doc python-h5py-doc python-biopython-doc rdkit-doc'),
    'webpython':   ('tech', 20e6, 'python-sqlalchemy-doc twisted-doc python-celery-doc python-scrapy-doc python-ipython-doc python-pytest-doc '
                                  'sphinx-doc python-cryptography-doc python-werkzeug-doc python-flask-doc python-aiohttp-doc python-tornado-doc python-ezdxf-doc'),
    'openstack':   ('tech', 16e6, 'nova-doc neutron-doc cinder-doc keystone-doc swift-doc glance-doc heat-doc ironic-doc octavia-doc manila-doc'),
    'compilers':   ('tech', 16e6, 'llvm-14-doc clang-14-doc cmake-doc emscripten-doc gradle-doc'),
    'languages':   ('tech', 20e6, 'erlang-doc swi-prolog-doc nim-doc libboost1.74-doc renpy-doc'),
    'perl':        ('tech', 7e6, 'perl-doc'),
    'manuals':     ('tech', 14e6, 'freebsd-manpages tcl8.6-doc'),
}
SPECIAL = ['<|endoftext|>', '[MASK]', '[gMASK]', '[sMASK]', '<sop>', '<eop>', '<|system|>', '<|user|>', '<|assistant|>', '<|observation|>',
           '<think>', '</think>', '<tool_call>', '</tool_call>', '<tool_response>', '</tool_response>', '<arg_key>', '</arg_key>', '<arg_value>',
           '</arg_value>', '/nothink'] + ['<|reserved_%d|>' % i for i in range(11)]     # 32 in all, at the top of the vocabulary
VOCAB = 8192


def fetch():
    os.makedirs(BUILD + '/debs', exist_ok=True)
    names = ' '.join(p for _, _, p in SOURCES.values()).split() + ['bsdgames']
    subprocess.run(['apt-get', 'download'] + names, cwd=BUILD + '/debs', check=True)
    os.makedirs(OUT, exist_ok=True)
    for deb in glob.glob(BUILD + '/debs/*.deb'):
        dest = os.path.join(OUT, os.path.basename(deb).split('_')[0])
        if not os.path.isdir(dest):
            subprocess.run(['dpkg', '-x', deb, dest], check=True)
    lists = BUILD + '/L/lists'                                                # a private copy, so that the system's lists stay as they are
    os.makedirs(lists + '/partial', exist_ok=True)
    subprocess.run(['apt-get', 'update', '-o', 'Dir::State::lists=' + lists, '-o', 'Acquire::Languages=en'], check=True)
    os.makedirs(BUILD + '/sw', exist_ok=True)
    for d in glob.glob(OUT + '/sword-*/usr/share/sword'):
        subprocess.run(['cp', '-r', d + '/.', BUILD + '/sw'], check=True)


# ---- extraction: every function yields documents, paragraphs on one line each, a blank line between paragraphs

SKIP_PAGE = re.compile(r'genindex|modindex|/search|_modules/|_sources/|/src/|classIndex|moduleIndex|nameIndex|undoccedSummary|/README|LICENSE|'
                       r'index-all|allclasses|package-tree|overview-tree|_static/|theindex|bookindex|changelog|whatsnew/|release-notes|releasenotes')
DROP_CLASS = re.compile(r'\b(sphinxsidebar\w*|related|headerlink|navheader|navfooter|toc|toctree-wrapper|breadcrumbs?|navbar\w*|sidebar\w*|footer|copyright|nav-\w+|menu\w*|bd-\w*nav\w*|bd-header|bd-toc|prevnext|top-nav|bottomNav|topNav)\b')
BLOCK = {'p', 'div', 'li', 'dt', 'dd', 'h1', 'h2', 'h3', 'h4', 'h5', 'h6', 'tr', 'table', 'ul', 'ol', 'dl', 'blockquote', 'section', 'article', 'br', 'hr', 'td', 'th', 'figure', 'main', 'body'}


def html_text(data):
    from lxml import html as LH                                                # imported here: only `text` needs it
    try:
        root = LH.document_fromstring(data)
    except Exception:
        return ''
    if (root.get('lang') or 'en')[:2] != 'en':
        return ''
    main = root.xpath('//*[@role="main"]') or root.xpath('//main') or root.xpath('//div[@class="body"]') or root.xpath('//body') or [root]
    out, line = [], []

    def flush(gap):
        s = ' '.join(''.join(line).split())
        line.clear()
        if s:
            out.append(s)
        if gap and out and out[-1]:
            out.append('')

    def walk(e):
        if not isinstance(e.tag, str) or e.tag in ('script', 'style', 'head', 'nav', 'footer', 'form', 'svg', 'button', 'title', 'math'):
            return
        if DROP_CLASS.search(e.get('class') or '') or e.get('role') == 'navigation':
            return
        if e.tag == 'pre':
            flush(False)
            code = e.text_content().rstrip().replace('\t', '    ').strip('\n')
            if len(code) < 3000:
                out.extend(code.split('\n'))
                out.append('')
            return
        block = e.tag in BLOCK
        if block:
            flush(False)
        if e.tag == 'li':
            line.append('- ')
        if e.text:
            line.append(e.text)
        for c in e:
            walk(c)
            if c.tail:
                line.append(c.tail)
        if e.tag in ('td', 'th'):
            line.append(' ')
        elif block:
            flush(e.tag in ('p', 'h1', 'h2', 'h3', 'h4', 'dd', 'table', 'ul', 'ol'))

    sys.setrecursionlimit(5000)
    try:
        walk(main[0])
    except RecursionError:
        return ''
    flush(False)
    return '\n'.join(out).replace('¶', '').replace('\u200b', '')


SENTENCE = re.compile(r'[A-Za-z].*[.:;!?,")]$')


def worth_reading(doc):
    """Reference pages made of signatures teach no English: at least a third of the letters must stand in sentence-like lines."""
    if len(doc) < 400:
        return False
    good = sum(len(l) for l in doc.split('\n') if len(l.split()) >= 8 and SENTENCE.match(l.strip()))
    letters = sum(c.isascii() for c in doc)
    return good >= 0.35 * len(doc) and letters >= 0.97 * len(doc)


def page(path):
    with open(path, 'rb') as f:
        data = f.read(3_000_000)
    doc = html_text(data)
    return doc if worth_reading(doc) else ''


def manual(path):
    r = subprocess.run(['mandoc', '-T', 'html', '-O', 'fragment'], input=gzip.open(path).read(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    doc = html_text(b'<html><body>' + r.stdout + b'</body></html>') if r.stdout else ''
    return doc if worth_reading(doc) else ''


def pod(path):
    doc = open(path, encoding='utf8', errors='replace').read()
    while True:                                                                # C<x>, L<text|name>, nested
        new = re.sub(r'\b[A-Z]<+\s?(?:[^<>|]*\|)?([^<>]*?)\s?>+', r'\1', doc)
        if new == doc:
            break
        doc = new
    paras = re.split(r'\n\s*\n', doc)
    keep = []
    for p in paras:
        if p.startswith('=item') or p.startswith('=head'):
            keep.append(' '.join(p.split()[1:]))
        elif p.startswith('='):
            continue
        elif p.startswith((' ', '\t')):
            keep.append(p.replace('\t', '    ').rstrip())
        else:
            keep.append(' '.join(p.split()))
    return '\n\n'.join(k for k in keep if k)


def plain_paragraphs(text):
    return '\n\n'.join(' '.join(p.split()) for p in re.split(r'\n\s*\n', text) if p.strip())


def novels():
    """r-cran-janeaustenr keeps the novels in R's own format: blocks of a length and a zlib stream, strings behind a 9 in the low flag byte."""
    rdb = open(OUT + '/r-cran-janeaustenr/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb', 'rb').read()
    off = 0
    while off < len(rdb):
        d = zlib.decompressobj()
        raw = d.decompress(rdb[off + 4:])
        off = len(rdb) - len(d.unused_data)
        i, lines = 0, []
        while i < len(raw) - 8:
            flags, n = struct.unpack('>II', raw[i:i + 8])
            if flags & 0xff == 9 and flags & ~0x000ff0ff == 0 and n < 5000:
                lines.append(raw[i + 8:i + 8 + n].decode('utf8', 'replace'))
                i += 8 + n
            else:
                i += 1
        if len(lines) > 100:
            yield plain_paragraphs('\n'.join(lines).replace('_', '')).replace('--', ' - ')


def sword(module):
    """mod2imp prints `$$$Book 1:2` before each entry; commentaries repeat one entry for every verse it covers."""
    r = subprocess.run(['mod2imp', module, '-s'], env=dict(os.environ, SWORD_PATH=BUILD + '/sw'), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    seen, part, doc = set(), None, []
    for entry in r.stdout.decode('utf8', 'replace').split('$$$')[1:]:
        ref, _, body = entry.partition('\n')
        chapter = ref.split(':')[0]
        if chapter != part:
            if doc:
                yield '\n\n'.join(doc) if module != 'engWEB2015eb' else ' '.join(doc)
            part, doc = chapter, []
        for p in body.split('\n'):
            p = re.sub(r'\* *([^*]{1,80}?) *\*', r'\1', p)                      # bold marks
            p = ' '.join(p.split())
            if p and p not in seen:
                seen.add(p)
                doc.append(p)
    if doc:
        yield '\n\n'.join(doc) if module != 'engWEB2015eb' else ' '.join(doc)


def devil():
    text = gzip.open(OUT + '/dict-devil/usr/share/dictd/devil.dict.dz').read().decode('utf8', 'replace')
    yield plain_paragraphs(text)


def wordnet_synsets():
    for part in ('noun', 'verb', 'adj', 'adv'):
        for line in open(glob.glob(OUT + '/wordnet-base/usr/share/wordnet/data.' + part)[0]):
            if line[0] == ' ' or '|' not in line:
                continue
            head, gloss = line.split('|', 1)
            f = head.split()
            n = int(f[3], 16)
            words = [re.sub(r'\(.*\)', '', f[4 + 2 * i]).replace('_', ' ') for i in range(n)]
            k = 4 + 2 * n
            pointers = [(f[k + 1 + 4 * j], f[k + 2 + 4 * j], f[k + 3 + 4 * j]) for j in range(int(f[k]))]
            yield part, f[0], words, pointers, gloss.strip()


def glosses():
    doc = []
    for part, _, words, _, gloss in wordnet_synsets():
        doc.append('%s (%s): %s' % (', '.join(words[:3]), part, gloss))
        if len(doc) == 60:
            yield '\n'.join(doc)
            doc = []


def descriptions():
    """(package, summary, paragraphs) from apt's Translation-en."""
    raw = subprocess.run(['lz4', '-dc'] + glob.glob(BUILD + '/L/lists/*bookworm_main_i18n_Translation-en.lz4'), stdout=subprocess.PIPE).stdout.decode('utf8', 'replace')
    for block in raw.split('\n\n'):
        m = re.match(r'Package: (\S+)\n(?:.*\n)*?Description-en: (.*)\n((?:.*\n?)*)', block)
        if m:
            paras, cur = [], []
            for l in m.group(3).split('\n'):
                if l.strip() == '.':
                    paras.append(cur)
                    cur = []
                elif l.startswith('  '):
                    cur.append('\n' + l.strip())
                elif l.strip():
                    cur.append(l.strip())
            paras.append(cur)
            yield m.group(1), m.group(2).strip(), [' '.join(p).replace(' \n', '\n') for p in paras if p]


def packages():
    seen, doc = set(), []
    for name, summary, paras in descriptions():
        new = [p for p in paras if p not in seen and len(p) > 60]
        seen.update(new)
        if new:
            doc.append('%s: %s\n\n%s' % (name, summary, '\n\n'.join(new)))
        if sum(map(len, doc)) > 9000:
            yield '\n\n'.join(doc)
            doc = []


def documents(name):
    if name == 'novels':
        return list(novels())
    if name == 'bible':
        return list(sword('engWEB2015eb'))
    if name == 'commentary':
        return [d for m in ('TDavid', 'MHCC', 'Scofield') for d in sword(m)]
    if name == 'essays':
        jargon = gzip.open(OUT + '/jargon-text/usr/share/doc/jargon-text/jargon.txt.gz').read().decode('utf8', 'replace')
        jargon = '\n'.join('' if l.strip()[:1] in '─│┌├└' else l for l in jargon.split('\n'))
        return list(devil()) + [plain_paragraphs(jargon)]
    if name == 'glosses':
        return list(glosses())
    if name == 'packages':
        return list(packages())
    if name == 'perl':
        return [d for d in map(pod, sorted(glob.glob(OUT + '/perl-doc/**/*.pod', recursive=True))) if worth_reading(d) and 'delta' not in d[:60]]
    files, work = [], page
    for pkg in SOURCES[name][2].split():
        if name == 'manuals':
            work = manual
            files += sorted(f for f in glob.glob(OUT + '/' + pkg + '/usr/share/man/**/*.gz', recursive=True) if not os.path.islink(f))
        elif pkg == 'rust-doc':
            for book in ('book', 'rust-by-example', 'reference', 'nomicon', 'cargo', 'rustc', 'embedded-book', 'edition-guide', 'unstable-book', 'rustdoc'):
                files += sorted(glob.glob(OUT + '/rust-doc/usr/share/doc/rust-doc/html/' + book + '/**/*.html', recursive=True))
        else:
            files += sorted(f for f in glob.glob(OUT + '/' + pkg + '/**/*.htm*', recursive=True) if not os.path.islink(f))
    files = [f for f in files if not SKIP_PAGE.search(f) and os.path.basename(f) not in ('print.html', 'all.html', 'toc.html')]
    if name == 'apache':                                                        # html.en pages only
        files = [f for f in files if not re.search(r'\.html\.(?!en)', f)]
    return [d for d in map(work, files) if d]


def number(text):
    return int.from_bytes(hashlib.blake2b(text.encode('utf8', 'replace'), digest_size=8).digest(), 'little')


RUN = re.compile(r'([^\w\s])\1{3,}')


def clean(doc, seen):
    """Drop repeated lines, rulers, number tables and word salads: what loops in the text loops in the model."""
    out = []
    for l in doc.split('\n'):
        l = l.rstrip()
        if len(l) >= 40:
            h = number(l.strip())
            if h in seen:
                continue
            seen.add(h)
        l = RUN.sub(r'\1\1\1', l)
        if l:
            alnum = [c for c in l if not c.isspace()]
            digits = sum(c.isdigit() for c in alnum)
            words = l.split()
            if len(alnum) > 12 and (digits > 0.3 * len(alnum) or sum(c.isalpha() for c in alnum) < 0.45 * len(alnum)):
                continue
            if 12 < len(words) < 80 and len(set(words)) < 0.4 * len(words):
                continue
            if l in out[-3:]:
                continue
        if l or (out and out[-1]):
            out.append(l)
    return '\n'.join(out).strip()


def pieces(doc, size=12000):
    """Cut long documents at blank lines (or sentence ends), so that every book has held-out parts."""
    while len(doc) > 1.5 * size:
        cut = doc.rfind('\n\n', size // 2, size)
        if cut < 0:
            cut = doc.rfind('\n', size // 2, size)
        if cut < 0:
            cut = doc.rfind('. ', size // 2, size) + 1
        if cut <= 0:
            cut = size
        yield doc[:cut].strip()
        doc = doc[cut:].strip()
    yield doc


def one_source(name):
    kind, cap, _ = SOURCES[name]
    seen, parts = set(), []
    for d in documents(name):
        d = html.unescape(d) if name in ('packages',) else d
        for i, p in enumerate(pieces(clean(d, seen))):
            if len(p) > 150:
                parts.append((number(p), len(parts), p))
    parts.sort()                                                                # a fixed shuffle, so that the cap and the split take a fair sample
    total, kept = 0, []
    for h, i, p in parts:
        if total > cap:
            break
        total += len(p)
        kept.append((i, p))
    n_held = max(12, len(kept) // 40)                                           # one piece in forty, a dozen at least
    n_held = min(n_held, len(kept) // 10)
    held, train = kept[:n_held], sorted(kept[n_held:])
    for tag, items in (('held', held), ('train', train)):
        with open('%s/text/%s.%s.txt' % (BUILD, name, tag), 'w') as f:
            f.write('\0'.join(p for _, p in items))
    return '%-12s %-5s %6.2f MB train  %5.2f MB held out  %6d pieces' % (name, kind, sum(len(p) for _, p in train) / 1e6, sum(len(p) for _, p in held) / 1e6, len(kept))


def text():
    os.makedirs(BUILD + '/text', exist_ok=True)
    with Pool(2) as pool:
        for line in pool.imap_unordered(one_source, sys.argv[2:] or list(SOURCES)):
            print(line, flush=True)


# ---- facts for tasks.py

def facts():
    """Words with their commonest sense (WordNet's index lists senses by frequency), kinds, parts, opposites; quiz tables; package summaries."""
    base = glob.glob(OUT + '/wordnet-base/usr/share/wordnet/data.noun')[0][:-len('data.noun')]
    syn = {(p, o): (w, ptr, g) for p, o, w, ptr, g in wordnet_synsets()}
    uses = {}                                                                   # (word, part) -> how often WordNet's own texts use it
    for line in open(base + 'cntlist.rev'):
        key, _, count = line.split()
        lemma, rest = key.split('%')
        part = {'1': 'noun', '2': 'verb', '3': 'adj', '4': 'adv', '5': 'adj'}[rest[0]]
        uses[lemma, part] = uses.get((lemma, part), 0) + int(count)
    tags = {}                                                                   # word -> (uses, part of speech, its first synset)
    for part in ('noun', 'verb', 'adj', 'adv'):
        for line in open(base + 'index.' + part):
            if line[0] == ' ':
                continue
            f = line.split()
            word, first = f[0].replace('_', ' '), f[6 + int(f[3])]
            n = uses.get((f[0], part), 0)
            if re.fullmatch(r"[a-z][a-z' -]{1,20}", word) and len(word) >= 3 and (word not in tags or n > tags[word][0]):
                tags[word] = (n, part, first)
    senses = {}
    for word, (n, part, off) in tags.items():
        w, ptr, gloss = syn[(part, off)]
        meaning = re.split(r';|"', gloss)[0].strip().rstrip(':').strip()
        meaning = ' '.join(re.sub(r'\([^)]*\)', '', meaning).split())
        if not 8 < len(meaning) < 150 or '(' in meaning or word in meaning.split()[:1] or not meaning.isascii():
            continue
        example = re.search(r'"([^"]{12,90})"', gloss)
        names = [x for x in w if x.lower() != word and re.fullmatch(r'[a-z -]+', x)]

        def linked(symbols, limit):
            r = []
            for s, o, p in ptr:
                if s in symbols:
                    t = syn.get(({'n': 'noun', 'v': 'verb', 'a': 'adj', 's': 'adj', 'r': 'adv'}[p], o))
                    if t and re.fullmatch(r'[a-z -]+', t[0][0]) and t[0][0] != word:
                        r.append(t[0][0])
            return r[:limit]
        senses[word] = dict(n=n, part=part, meaning=meaning, example=example.group(1) if example and word[:4] in example.group(1) else '', also=names[:3],
                            kind=linked(('@',), 1), kinds=linked(('~',), 6), parts=linked(('%p',), 4), of=linked(('#p',), 2), opposite=linked(('!',), 1) if part in ('adj', 'noun', 'verb', 'adv') else [])
    common = sorted(senses, key=lambda w: (-senses[w]['n'], w))
    quiz = []
    Q = OUT + '/bsdgames/usr/share/games/bsdgames/quiz/'

    def tidy(s):
        s = re.sub(r'\{[^{}]*\}', '', re.sub(r'\{[^{}]*\}', '', s))
        s = re.sub(r'\[([^]|]*)[^]]*\]', r'\1', s)
        return s.split('|')[0].strip()
    rows = lambda name: [[tidy(c) for c in l.rstrip('\n').split(':')] for l in open(Q + name) if ':' in l]
    for t in ('africa', 'america', 'asia', 'europe'):
        quiz += [('capital', r[0], r[1]) for r in rows(t) if r[0].isascii() and r[1].isascii() and r[1]]
    quiz += [('state', r[0], r[1]) for r in rows('state') if len(r) > 1]
    quiz += [('element', r[3], r[0], r[1]) for r in rows('elements') if len(r) > 3]
    quiz += [('baby', r[0], r[1]) for r in rows('babies')]
    quiz += [('flower', r[0], r[1]) for r in rows('flowers') if len(r) > 1]
    pk = []
    for name, summary, paras in descriptions():
        if paras and re.fullmatch(r'[a-z][a-z0-9+.-]{2,24}', name) and not name.startswith('lib') and not re.search(r'-(dev|dbg|doc|data|l10n|common)$', name) and 15 < len(summary) < 80:
            pk.append((name, summary))
    pk = sorted(pk, key=lambda p: number(p[0]))[:9000]
    json.dump(dict(senses={w: senses[w] for w in common[:24000]}, common=common[:3600], quiz=quiz, packages=pk), open(BUILD + '/facts.json', 'w'))
    print(len(senses), 'senses;', common[:30], common[3590:3600], len(quiz), 'quiz rows', len(pk), 'packages')


# ---- tokenizer and packing

SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def read(name, tag):
    text = open('%s/text/%s.%s.txt' % (BUILD, name, tag)).read()
    return re.sub(r'(?m)^-\n+', '- ', text).split('\0')                         # a list item's dash back to its paragraph


def tokenizer():
    """Digits one by one, so that a sum is a sequence; the special strings are GLM's, at the top of the vocabulary as there."""
    import random
    from tokenizers import Tokenizer, Regex, models, pre_tokenizers, decoders, trainers, AddedToken
    import tasks
    tok = Tokenizer(models.BPE(ignore_merges=False))
    tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), 'isolated'), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()

    def sample():
        for name, (kind, _, _) in SOURCES.items():
            docs = read(name, 'train')
            if kind == 'prose':
                yield from docs
            yield from docs[::1 if kind == 'prose' else 3]                      # prose twice, a third of the manuals
        g = tasks.Tasks(random.Random(11), json.load(open(BUILD + '/facts.json')))
        for _ in range(60000):
            d = g.dialogue()
            yield '\n'.join(x for q, t, a, _ in d['turns'] for x in (q, t, a) if x)
    trainer = trainers.BpeTrainer(vocab_size=VOCAB - len(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[], min_frequency=20)
    tok.train_from_iterator(sample(), trainer)
    assert tok.get_vocab_size() == VOCAB - len(SPECIAL), tok.get_vocab_size()
    tok.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    assert tok.get_vocab_size() == VOCAB
    tok.save(BUILD + '/tokenizer.json', pretty=False)


def pack():
    import numpy as np
    from tokenizers import Tokenizer
    tok = Tokenizer.from_file(BUILD + '/tokenizer.json')
    arrays, meta, at = [], {}, 0
    for name, (kind, _, _) in SOURCES.items():
        meta[name] = dict(kind=kind)
        for tag in ('train', 'held'):
            docs = read(name, tag)
            lens = []
            for i in range(0, len(docs), 2000):
                for e in tok.encode_batch_fast(docs[i:i + 2000], add_special_tokens=False):
                    a = np.array(e.ids, dtype=np.uint16)
                    arrays.append(a)
                    lens.append(len(a))
            meta[name][tag] = dict(start=at, lens=lens)
            at += sum(lens)
            print('%-12s %-5s %7.2f M tokens, %.2f bytes a token' % (name, tag, sum(lens) / 1e6, sum(map(len, docs)) / max(1, sum(lens))), flush=True)
    np.concatenate(arrays).tofile(BUILD + '/corpus.bin')
    json.dump(meta, open(BUILD + '/corpus.json', 'w'))


def squeeze():
    import lzma
    import numpy as np
    a = np.fromfile(BUILD + '/corpus.bin', dtype=np.uint16)                     # low and high bytes apart pack better
    with lzma.open(BUILD + '/corpus.xz', 'wb') as f:
        f.write(np.concatenate([(a & 255).astype(np.uint8), (a >> 8).astype(np.uint8)]).tobytes())


# ---- the smaller vocabulary of mini-v41: the first merges of the same tokenizer, so that packed tokens come apart into it without the text

VOCAB_V41 = 4096
SPECIAL_V41 = ['<｜begin▁of▁sentence｜>', '<｜end▁of▁sentence｜>', '<｜▁pad▁｜>', '<｜User｜>', '<｜Assistant｜>', '<｜System｜>', '<think>', '</think>', '<｜deepseek_image｜>'] + ['<｜reserved_%d｜>' % i for i in range(23)]


def shorten():
    tok, plain = json.load(open(BUILD + '/tokenizer.json')), VOCAB_V41 - len(SPECIAL_V41)
    letters = len(tok['model']['vocab']) - len(tok['model']['merges'])
    tok['model']['vocab'] = {t: i for t, i in tok['model']['vocab'].items() if i < plain}
    tok['model']['merges'] = tok['model']['merges'][:plain - letters]
    tok['added_tokens'] = [dict(tok['added_tokens'][0], id=plain + i, content=s, special=i < 3) for i, s in enumerate(SPECIAL_V41)]
    json.dump(tok, open(BUILD + '/tokenizer-v41.json', 'w'), ensure_ascii=False, separators=(',', ':'))


def apart():
    """What each token of the larger vocabulary is in the smaller one; None for its special tokens."""
    model, plain = json.load(open(BUILD + '/tokenizer.json'))['model'], VOCAB_V41 - len(SPECIAL_V41)
    parts = [[i] for i in range(plain)]
    letters = len(model['vocab']) - len(model['merges'])
    for a, b in model['merges'][plain - letters:]:
        parts.append(parts[model['vocab'][a]] + parts[model['vocab'][b]])
    return parts


if __name__ == '__main__':
    {f.__name__: f for f in (fetch, text, facts, tokenizer, pack, squeeze, shorten)}[sys.argv[1]]()
