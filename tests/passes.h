/* passes.h: rows through an engine, for tests that have no wish to tend the KV hierarchy themselves. Include after engine.c. */
#ifndef TIDE_PASSES_H
#define TIDE_PASSES_H

/* A session's stay begins where it is not there yet, with room for its whole context; rows from `position` on are forgotten, and
 * there are places for `wanted` of them. Returns how many that can be in one pass, 0 with an error. */
static int prepare_rows(Engine *engine, int session, int position, int wanted, Error *error) {
    Cache *cache = &engine->cache;
    int cached;
    for (int tries = 0; !cache->session[session].admitted && !cache_admit(cache, session, NULL, 0, cache->context, &cached); tries++) {
        if (tries == 100) return fail(error, "session %d waits for ever", session), 0;
        cache_step(cache);
    }
    if (!cache_truncate(cache, session, position)) return fail(error, "session %d cannot go back to %d", session, position), 0;
    return cache_room(cache, session, wanted);
}

/* One pass: like forward(), but sessions are admitted as they come, a position that is there already is run again with all behind
 * it forgotten, and what went through is committed. A session's rows follow each other. */
static bool run_rows(Engine *engine, const Row *rows, int n_rows, Error *error) {
    cache_step(&engine->cache);
    for (int first = 0, last; first < n_rows; first = last) {
        for (last = first; last < n_rows && rows[last].session == rows[first].session;) last++;
        int room = prepare_rows(engine, rows[first].session, rows[first].position, last - first, error);
        if (room < last - first)
            return room && fail(error, "session %d has room for %d rows, not %d", rows[first].session, room, last - first);
    }
    if (!forward(engine, rows, n_rows, error)) return false;
    for (int r = 0; r < n_rows; r++)
        if (r + 1 == n_rows || rows[r + 1].session != rows[r].session)
            cache_commit(&engine->cache, rows[r].session, rows[r].position + 1);
    return true;
}

/* Ends every stay, and fills whatever a session could read by mistake with `byte`. */
static void start_over(Engine *engine, int byte) {
    Cache *cache = &engine->cache;
    for (int s = 0; s < cache->sessions; s++) cache_release(cache, s);
    while (cache->n_transfers || cache->n_retired) cache_step(cache);
    memset(cache->device, byte, (size_t)cache->device_pages.n_pages * page_bytes(cache));
    memset(cache->index_keys, byte, (size_t)cache->index_pages.n_pages * index_page_bytes(cache));
}

#endif
