#!/usr/bin/env python3
"""mutate.py: spoils one rule of the KV hierarchy at a time in a copy of the engine and sees test_hierarchy, or test_forward, fail.

    tests/mutate.py [NAME...]        all of them, or those whose names contain one of these

Each edit replaces a text that occurs exactly once in engine.c, backend.c and engine.h together; where it does not, they have moved on
and the edit has to follow. The copies are built without TIDE_DEBUG, so that the engine does not notice by itself: the test has to."""
import concurrent.futures
import os
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

MUTANTS = [
    # the five that the issue names
    ("protect step: hits are not stamped before victims are chosen",
     "        block->hot.stamp[cache->places[i]] = block->now;\n", ""),
    ("protect step: hits are stamped after victims were chosen",
     "    if (room) oldest_slots(cache->victims, block->hot.stamp, block->now, block->hot_rows, room);",
     "    for (int i = 0; i < block->n; i++)\n        if (cache->places[i] >= 0) block->hot.stamp[cache->places[i]] = 0;\n"
     "    if (room) oldest_slots(cache->victims, block->hot.stamp, block->now, block->hot_rows, room);\n"
     "    for (int i = 0; i < block->n; i++)\n        if (cache->places[i] >= 0) block->hot.stamp[cache->places[i]] = block->now;"),
    ("ready rule: a page is published when its copy begins",
     "    session->n_optional++;\n    session->populated = cache->rounds_begun;\n    begin_copy(",
     "    session->n_optional++;\n    session->populated = cache->rounds_begun;\n"
     "    *ready_page(cache, s, page) = session->pages[page].device;\n    begin_copy("),
    ("backup before free: a recalled page leaves without its backup",
     "    if (on_host(cache, s, page)) withdraw(cache, s, page);\n    else begin_backup(cache, s, page);",
     "    withdraw(cache, s, page);"),
    ("source offset: every source lies where the first does",
     "    return cache->device + rows_before(cache, source.id) *", "    return cache->device + (size_t)0 *"),
    ("source offset: every source lies where the first does on the host",
     "    return cache->host + rows_before(cache, source.id) *", "    return cache->host + (size_t)0 *"),
    ("committed frontier: rejected rows count too",
     "    session->committed = n;\n    advance_tail(cache, s);",
     "    session->committed = n = session->placed;\n    advance_tail(cache, s);"),
    # the resolver
    ("victims: of equals the highest slot",
     "    select_highest(picks, stamps, n, k, shift, true, now);",
     "    bool taken[65536] = {false};\n    for (int c = 0; c < k; c++) {\n        int best = -1;\n        for (int i = 0; i < n; i++)\n"
     "            if (!taken[i] && (best < 0 || stamps[i] <= stamps[best])) best = i;\n        taken[best] = true;\n    }\n"
     "    for (int i = 0, c = 0; i < n; i++)\n        if (taken[i]) picks[c++] = i;"),
    ("victims: two ages count as one", "(ages ? now - stamps[i] :", "(ages ? (now - stamps[i]) & ~1u :"),
    ("victims: first in, first out",
     "        block->hot.stamp[cache->places[i]] = block->now;\n",
     "        if (!block->hot.stamp[cache->places[i]]) block->hot.stamp[cache->places[i]] = block->now;\n"),
    ("staging: blocks of one run share a place", "        staging += last - first > 1;", "        staging += 0;"),
    ("staging: a row too many goes over the first one", "staging * cache->staging_rows + taken};",
     "staging * cache->staging_rows};"),
    ("staging: more blocks in a run than it has room for", "blocks + several > cache->staging_blocks",
     "blocks + several > cache->staging_blocks + 1"),
    ("staging: the arenas of a group begin together", "cache->staging + arena * rows * cache->format.stride",
     "cache->staging + 0 * arena * rows * cache->format.stride"),
    ("followers: copied ahead, though a later run takes their slots", "state->n_runs == 1 ? cache->live_sources : 1", "cache->live_sources"),
    ("followers: copied into an arena whose rows are still wanted", "source < i + ahead && source < cache->sources",
     "source < i + ahead + 1 && source < cache->sources"),
    ("followers: a following layer copies nothing", "cache->member_of[i] ? i + ahead - 1 : i;", "i + (cache->member_of[i] ? ahead : 0);"),
    ("slot_of: names a slot whose row is gone",
     "    if (block->hot.tag[slot] >= 0) block->hot.slot_of[block->hot.tag[slot]] = 0;\n    block->hot.tag", "    block->hot.tag"),
    ("pads: the last location stays", "        locations[i] = nowhere;\n        if (row < 0) continue;",
     "        if (row < 0) continue;"),
    ("plan: a follower replays the whole plan for each run",
     "const int first = run_begin(plan, run), count = plan->count[run];", "const int first = 0, count = run_begin(plan, run + 1);"),
    ("plan: the entries of two runs in the same place", "    for (int i = 0; i < run; i++) begin += plan->count[i];\n", ""),
    ("runs: a session twice in one run", "if (again || blocks", "if (blocks"),
    ("tail: found by the page, not modulo the ring", "? *tail_page(cache, session, page) :", "? tail_page(cache, session, 0)[page % 3] :"),
    # the controller
    ("copies: do not hold their host page",
     "    drop_host_page(cache, transfer->host);\n}", "    settle_host_page(cache, transfer->host);\n}",
     "    cache->host_info[transfer.host.id].refs++;", "    (void)0;"),
    ("copies: a page that is being copied is given back at once",
     "    if (history->state != PAGE_ABSENT && !history->in_flight) retire(", "    if (history->state != PAGE_ABSENT) retire("),
    ("copies: index keys that are being copied are given back at once", "    if (!keys_copied) retire(",
     "    keys_copied = false;\n    if (!keys_copied) retire(",
     "        if (!no_page(transfer->index)) retire(", "        if (false) retire("),
    ("copies: complete when they begin", "        cache->host_info[transfer->host.id].rows = transfer->first + transfer->count;\n", "        (void)0;\n",
     "    cache->transfers[cache->n_transfers] = transfer;",
     "    if (transfer.to_host) cache->host_info[transfer.host.id].rows = transfer.first + transfer.count;\n"
     "    cache->transfers[cache->n_transfers] = transfer;"),
    ("backup: begins from the first row again, and counts wrongly",
     ".rows = transfer->first + transfer->count;", ".rows = transfer->count;"),
    ("readers: a page is given back while a pass may read it",
     "    cache->retired[cache->n_retired++] = (Retired){list, page, cache->rounds_begun};", "    give_page(list, page);"),
    ("prefix: a page is known by its own ids alone", "    PrefixKey key = {.parent = parent};", "    PrefixKey key = {.parent = !!parent};"),
    ("prefix: a parent is known by its page's id, which comes again", "        info->serial = ++cache->serials;",
     "        info->serial = (uint32_t)host_page(cache, s, page)->id;"),
    ("prefix: known before it is complete", "        if (cache->host_info[chain[found].id].rows == PAGE_ROWS) continue;\n", "        continue;\n"),
    ("prefix: the last row is not run again", "    for (; (found + 1) * PAGE_ROWS < n_ids; found++) {",
     "    for (; (found + 1) * PAGE_ROWS <= n_ids; found++) {"),
    ("prefix: index keys stay where they are", "        cache->backend->finish_copy(cache, &keys, true);\n", "        keys.index.id = 0;\n        cache->backend->finish_copy(cache, &keys, true);\n"),
    ("prefix: kept when the prompt goes on in another way",
     "        forget_key(cache, host_info(cache, s, page));   /*", "        (void)0;   /*"),
    ("prefix: a shared page is written to", "        if (host_info(cache, s, page)->refs > 1) {  /*", "        if (false) {  /*"),
    ("recall: the session with fewest pages first",
     "    if (x->n_optional != y->n_optional) return x->n_optional > y->n_optional;",
     "    if (x->n_optional != y->n_optional) return x->n_optional < y->n_optional;"),
    ("recall: the session populated last first", "x->populated < y->populated", "x->populated > y->populated"),
    ("recall: dirty sessions first", "    if (left != right) return left > right;", "    if (left != right) return left < right;"),
    ("recall: a share too small", " * cache->session[s].n_optional + lent - 1) / lent;", " * cache->session[s].n_optional) / lent;"),
    ("recall: pages on their way back are asked for again", "recall(cache, deficit - pages_coming(cache));", "recall(cache, deficit);"),
    ("recall: in resident mode too", "        if (cache->mode == MODE_ADAPTIVE && found >= 0) recall(", "        if (found >= 0) recall("),
    ("recall: for a prompt that waits for another to compute its prefix", "MODE_ADAPTIVE && found >= 0) recall(", "MODE_ADAPTIVE) recall("),
    ("truncate: tags stay", "    drop_pages(cache, s, first);\n    cache->backend->forget_hot(cache, s);", "    drop_pages(cache, s, first);"),
    ("truncate: a complete page is left in the tail",
     "    for (; cache->tables.tail_base[s] < first * PAGE_ROWS; end_copies(cache, INT_MAX, true)) advance_tail(cache, s);\n", ""),
    ("truncate: wants host pages for what nobody shares", "        shared += host_info(cache, s, page)->refs > 1;",
     "        shared += host_info(cache, s, page)->key != NULL;"),
    ("truncate: copies go on", "    if (n >= session->committed) return true;\n    end_copies(cache, INT_MAX, true);", "    if (n >= session->committed) return true;"),
    ("admission: the reserve is given away", "int deficit = needed + cache->reserve - cache->device_pages.n_free;",
     "int deficit = needed - cache->device_pages.n_free;"),
    ("admission: host pages are not looked for", "             && (resident || free_host_pages(cache, pages - found));", "             && (resident || free_host_pages(cache, 0) || true);"),
    ("lending: what a waiting session needs", "cache->mode == MODE_ADAPTIVE && !cache->waiting &&", "cache->mode == MODE_ADAPTIVE &&"),
    ("lending: the reserve", "cache->device_pages.n_free - cache->reserve >= pages;", "cache->device_pages.n_free >= pages;"),
    ("tail: a page leaves it without a host copy", "        } else if (on_host(cache, s, page) && !history->in_flight) {", "        } else if (true) {"),
    ("failed pass: hot slots keep what never came", "            hot.tag[slot] = -1;\n", ""),
    # DeepSeek-V4's and V4.1's rows, which test_forward's goldens hold
    ("trails: a ring is read as if it were a position shorter",
     "(size_t)(position % trail->length)) * trail->stride;", "(size_t)(position % (trail->length - 1))) * trail->stride;"),
    ("trails: what is committed is not kept", "    if (cache->trail_layers) keep_committed(cache, s, n);\n", ""),
    ("trails: a pass's rows are looked for one row too late",
     "int at = r - (rows[r].position - position), session", "int at = r + 1 - (rows[r].position - position), session"),
    ("stretch: every source has as many rows", "cache->stretch[s] = config->source_ratio[s] / cache->ratio;", "cache->stretch[s] = 1;"),
]


def read(name):
    with open(os.path.join(ROOT, name)) as file:
        return file.read()


SOURCES = {name: read(name) for name in ("engine.c", "backend.c", "engine.h", "tests/test_hierarchy.c", "tests/test_forward.c", "tests/passes.h", "tests/check.h", "tests/scratch.h")}


def test_of(name):
    """The test that is to fail, and its arguments."""
    fixtures = [os.path.join(ROOT, "tests/fixtures", fixture) for fixture in ("deepseek_v4-c", "deepseek_v41-a")]
    return ("tests/test_forward.c", fixtures) if name.startswith(("trails", "stretch")) else ("tests/test_hierarchy.c", [])


def build(directory, test, edits):
    sources = dict(SOURCES)
    for old, new in zip(edits[0::2], edits[1::2]):
        found = [name for name in ("engine.c", "backend.c", "engine.h") for _ in range(sources[name].count(old))]
        if len(found) != 1:
            return None, f"the engine has this {len(found)} times, wanted 1:\n{old}"
        sources[found[0]] = sources[found[0]].replace(old, new)
    os.mkdir(os.path.join(directory, "tests"))
    for name, text in sources.items():
        with open(os.path.join(directory, name), "w") as file:
            file.write(text)
    program = os.path.join(directory, "test")
    command = ["gcc", "-std=gnu11", "-O1", "-march=native", "-w", "-fopenmp", "-fno-math-errno", test,
               os.path.join(ROOT, "build/tokenizer.o"), "-lcjson", "-lpcre2-8", "-lutf8proc", "-lxxhash", "-ledit", "-lm", "-o", program]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    return (program, "") if done.returncode == 0 else (None, "does not build:\n" + done.stderr)


def try_mutant(mutant):
    """What killed it; or None and what is wrong."""
    with tempfile.TemporaryDirectory() as directory:
        test, arguments = test_of(mutant[0])
        program, problem = build(directory, test, mutant[1:])
        if not program:
            return None, problem
        try:
            done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=300, errors="replace",
                                  env=dict(os.environ, OMP_NUM_THREADS="1", TRACES="3000", FAILURES="1"))
        except subprocess.TimeoutExpired:
            return "it never ends", ""
        if done.returncode == 0:
            return None, "SURVIVES"
        failures = [line for line in done.stderr.splitlines() if "failed: " in line]
        return failures[0].split("failed: ", 1)[1] if failures else f"signal {-done.returncode}", ""


def main():
    wanted = [m for m in MUTANTS if not sys.argv[1:] or any(word in m[0] for word in sys.argv[1:])]
    killed = 0
    for test in {test_of(name)[0]: name for name, *_ in wanted}.values():
        death, problem = try_mutant((test,))
        if problem != "SURVIVES":
            sys.exit(f"the code as it is: {death or problem}")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for mutant, (death, problem) in zip(wanted, pool.map(try_mutant, wanted)):
            killed += death is not None
            print(f"{mutant[0]}\n    {death or problem}", flush=True)
    print(f"{killed} of {len(wanted)} mutants killed")
    return killed < len(wanted)


if __name__ == "__main__":
    sys.exit(main())
