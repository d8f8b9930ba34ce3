-- The named numbers. Each view or macro stands on the tables of the dataset
-- and keeps the raw counts behind its number, so that a pooled value over any
-- set of rows is sum / sum again. docs/metrics.md explains them one by one.
--
-- A slot is scored if and only if its hit is not NULL: its own token exists
-- and carries loss mask 1. An unscored slot is never a miss. Where nothing is
-- counted, the number is NULL, never 0: every division goes by nullif.

-- blocks: one row an anchor.
--   lead_scored  leading slots that are scored
--   lead_hits    leading slots that hit: min over k of the first slot that is
--                a miss or unscored, minus 1
--   lead_top8    the same for "the label is among the drafter's 8 best"
--   capped       the run of hits ended because scoring did, not by a miss
CREATE VIEW blocks AS
SELECT *, lead_hits = lead_scored AND lead_scored < slots AS capped
FROM (
    SELECT run, drafter, seq_id, anchor,
           count(*) AS slots,
           count(hit) AS scored,
           count(*) FILTER (hit) AS hits,
           coalesce(min(slot) FILTER (hit IS NULL), max(slot)::BIGINT + 1) - 1 AS lead_scored,
           coalesce(min(slot) FILTER (hit IS NULL OR NOT hit), max(slot)::BIGINT + 1) - 1 AS lead_hits,
           coalesce(min(slot) FILTER (hit IS NULL OR rank IS NULL OR rank >= 8), max(slot)::BIGINT + 1) - 1 AS lead_top8
    FROM slots
    GROUP BY run, drafter, seq_id, anchor
);

-- slot_accuracy[k] = hits / scored at slot k, over all anchors (marginal:
-- what happened at the slots before does not matter).
--   data_accuracy[k] = data_hits / scored: the draft is the data token, not
--   the target's argmax. Both are equal on greedy text.
CREATE VIEW slot_accuracy_by_sequence AS
SELECT run, drafter, seq_id, slot,
       count(*) FILTER (hit) AS hits,
       count(hit) AS scored,
       count(*) FILTER (hit) / nullif(count(hit), 0) AS accuracy,
       count(*) FILTER (hit IS NOT NULL AND draft_token = data_token) AS data_hits,
       count(*) FILTER (hit IS NOT NULL AND draft_token = data_token) / nullif(count(hit), 0) AS data_accuracy
FROM slots
GROUP BY run, drafter, seq_id, slot;

CREATE VIEW slot_accuracy AS
SELECT run, drafter, slot,
       sum(hits)::BIGINT AS hits,
       sum(scored)::BIGINT AS scored,
       sum(hits) / nullif(sum(scored), 0) AS accuracy,
       sum(data_hits)::BIGINT AS data_hits,
       sum(data_hits) / nullif(sum(scored), 0) AS data_accuracy
FROM slot_accuracy_by_sequence
GROUP BY run, drafter, slot;

-- prefix_rate[k] = prefix_hits / anchors: the share of anchors whose slots
-- 1..k all hit (unconditional). The denominator is the anchors whose slots
-- 1..k are all scored.
-- conditional_rate[k] = prefix_hits / reached: of those anchors, the ones
-- whose slots 1..k-1 all hit. It is prefix_rate[k] / prefix_rate[k-1] with
-- both taken over the same anchors, and so never above 1. NULL when no anchor
-- got that far.
--   prefix_ratio[k] = prefix_rate[k] / prefix_rate[k-1] as they stand, each
--   over its own anchors; where anchors lose slots at the end of a sequence
--   it may exceed 1.
CREATE VIEW prefix_rate_by_sequence AS
SELECT run, drafter, seq_id, slot,
       count(*) FILTER (lead_scored >= slot) AS anchors,
       count(*) FILTER (lead_hits >= slot) AS prefix_hits,
       count(*) FILTER (lead_scored >= slot AND lead_hits >= slot - 1) AS reached
FROM (SELECT *, unnest(range(1, slots + 1))::INTEGER AS slot FROM blocks)
GROUP BY run, drafter, seq_id, slot;

CREATE VIEW prefix_rate AS
SELECT run, drafter, slot,
       sum(anchors)::BIGINT AS anchors,
       sum(prefix_hits)::BIGINT AS prefix_hits,
       sum(prefix_hits) / nullif(sum(anchors), 0) AS prefix_rate
FROM prefix_rate_by_sequence
GROUP BY run, drafter, slot;

CREATE VIEW conditional_rate AS
SELECT run, drafter, slot, prefix_hits, reached, conditional_rate,
       rate / nullif(CASE WHEN slot = 1 THEN 1 ELSE lag(rate) OVER w END, 0) AS prefix_ratio
FROM (
    SELECT run, drafter, slot,
           sum(prefix_hits)::BIGINT AS prefix_hits,
           sum(reached)::BIGINT AS reached,
           sum(prefix_hits) / nullif(sum(reached), 0) AS conditional_rate,
           sum(prefix_hits) / nullif(sum(anchors), 0) AS rate
    FROM prefix_rate_by_sequence
    GROUP BY run, drafter, slot
)
WINDOW w AS (PARTITION BY run, drafter ORDER BY slot);

-- eal = sum over k of the product over i <= k of slot_accuracy[i]. It assumes
-- that slots are independent, and counts no bonus token. The sum ends before
-- the first slot that was never scored; slots says how many terms it has.
CREATE VIEW eal AS
SELECT run, drafter,
       count(*) FILTER (unbroken) AS slots,
       sum(term) FILTER (unbroken) AS eal
FROM (
    SELECT run, drafter,
           product(accuracy) OVER w AS term,
           bool_and(accuracy IS NOT NULL) OVER w AS unbroken
    FROM slot_accuracy
    WINDOW w AS (PARTITION BY run, drafter ORDER BY slot)
)
GROUP BY run, drafter;

-- expected_accepted = sum over k of prefix_rate[k]: the mean number of leading
-- hits, with no assumption of independence and no bonus token.
CREATE VIEW expected_accepted AS
SELECT run, drafter, count(prefix_rate) AS slots, sum(prefix_rate) AS expected_accepted
FROM prefix_rate
GROUP BY run, drafter;

-- top8_streak = mean over anchors of lead_top8: how many leading slots have
-- their label (the target's argmax) among the drafter's 8 best. An unscored
-- slot ends the count; an anchor whose first slot is unscored is not counted.
-- A rank that is NULL lies past the stored top K and is no top 8, for K >= 8.
CREATE VIEW top8_streak_by_sequence AS
SELECT run, drafter, seq_id,
       count(*) FILTER (lead_scored >= 1) AS anchors,
       coalesce(sum(lead_top8) FILTER (lead_scored >= 1), 0)::BIGINT AS sum_streak
FROM blocks
GROUP BY run, drafter, seq_id;

CREATE VIEW top8_streak AS
SELECT run, drafter,
       sum(anchors)::BIGINT AS anchors,
       sum(sum_streak)::BIGINT AS sum_streak,
       sum(sum_streak) / nullif(sum(anchors), 0) AS top8_streak
FROM top8_streak_by_sequence
GROUP BY run, drafter;

-- accept_len counts the bonus token: accepted drafts + 1. Truncated rounds
-- are left out of every mean and counted beside it.
--   accept_len_micro = sum of accept_len / rounds, pooled
--   accept_len_macro = mean over sequences of each one's mean; a sequence
--                      without a whole round has no mean
--   accepted_micro, accepted_macro: the same without the bonus
CREATE VIEW accept_len_by_sequence AS
SELECT run, drafter, method, budget, seq_id,
       count(*) FILTER (NOT truncated) AS rounds,
       count(*) FILTER (truncated) AS truncated,
       coalesce(sum(accepted) FILTER (NOT truncated), 0)::BIGINT AS sum_accepted,
       avg(accept_len) FILTER (NOT truncated) AS accept_len,
       avg(accepted) FILTER (NOT truncated) AS accepted
FROM rounds
GROUP BY run, drafter, method, budget, seq_id;

CREATE VIEW accept_len AS
SELECT run, drafter, method, budget,
       count(accept_len) AS sequences,
       sum(rounds)::BIGINT AS rounds,
       sum(truncated)::BIGINT AS truncated,
       sum(sum_accepted)::BIGINT AS sum_accepted,
       avg(accept_len) AS accept_len_macro,
       (sum(sum_accepted) + sum(rounds)) / nullif(sum(rounds), 0) AS accept_len_micro,
       avg(accepted) AS accepted_macro,
       sum(sum_accepted) / nullif(sum(rounds), 0) AS accepted_micro
FROM accept_len_by_sequence
GROUP BY run, drafter, method, budget;

-- ddtree_accept_len(N): accept_len of rounds by a tree of N nodes, root not
-- counted.
CREATE VIEW ddtree_accept_len AS
SELECT run, drafter, budget, sequences, rounds, truncated, sum_accepted,
       accept_len_macro, accept_len_micro, accepted_macro, accepted_micro
FROM accept_len
WHERE method = 'ddtree';

-- accept_len_histogram: how the whole rounds spread over accept_len.
CREATE VIEW accept_len_histogram AS
SELECT run, drafter, method, budget, accept_len, count(*) AS rounds,
       count(*) / sum(count(*)) OVER (PARTITION BY run, drafter, method, budget) AS share
FROM rounds
WHERE NOT truncated
GROUP BY run, drafter, method, budget, accept_len;

-- accept_len and slot_accuracy by the sequences' tags, one row a tag value. A
-- sequence with several tags stands in several rows.
CREATE VIEW sequence_tags AS
SELECT run, seq_id, entry.key AS tag, entry.value AS value
FROM (SELECT run, seq_id, unnest(map_entries(tags)) AS entry FROM sequences);

CREATE VIEW accept_len_by_tag AS
SELECT run, drafter, method, budget, tag, value,
       count(accept_len) AS sequences,
       sum(rounds)::BIGINT AS rounds,
       sum(truncated)::BIGINT AS truncated,
       sum(sum_accepted)::BIGINT AS sum_accepted,
       avg(accept_len) AS accept_len_macro,
       (sum(sum_accepted) + sum(rounds)) / nullif(sum(rounds), 0) AS accept_len_micro
FROM accept_len_by_sequence JOIN sequence_tags USING (run, seq_id)
GROUP BY run, drafter, method, budget, tag, value;

CREATE VIEW slot_accuracy_by_tag AS
SELECT run, drafter, tag, value, slot,
       sum(hits)::BIGINT AS hits,
       sum(scored)::BIGINT AS scored,
       sum(hits) / nullif(sum(scored), 0) AS accuracy
FROM slot_accuracy_by_sequence JOIN sequence_tags USING (run, seq_id)
GROUP BY run, drafter, tag, value, slot;

-- accept_len by the sequence's length in tokens: bucket b holds the lengths
-- from b up to, but not including, 2b.
CREATE VIEW accept_len_by_length AS
SELECT run, drafter, method, budget,
       (2 ** floor(log2(length)))::BIGINT AS bucket,
       count(accept_len) AS sequences,
       sum(rounds)::BIGINT AS rounds,
       sum(truncated)::BIGINT AS truncated,
       sum(sum_accepted)::BIGINT AS sum_accepted,
       avg(accept_len) AS accept_len_macro,
       (sum(sum_accepted) + sum(rounds)) / nullif(sum(rounds), 0) AS accept_len_micro
FROM accept_len_by_sequence JOIN sequences USING (run, seq_id)
WHERE length >= 1
GROUP BY run, drafter, method, budget, bucket;

-- slot_losses: the losses of every slot, in nats; p is the target's softmax,
-- q the drafter's.
--   ce  = -log q(argmax p)      kl  = sum p log(p/q)    rkl = sum q log(q/p)
--   jsd = (KL(p|m) + KL(q|m))/2, m = (p+q)/2            tv  = 1 - sum min(p,q)
--   nla = -log max(alpha, 1e-5), alpha = sum min(p,q) = 1 - tv
-- The CASE is needed: greatest() skips NULL and would make 11.5 of it.
CREATE VIEW slot_losses AS
SELECT run, drafter, seq_id, anchor, slot, hit IS NOT NULL AS scored,
       ce::DOUBLE AS ce, kl::DOUBLE AS kl, rkl::DOUBLE AS rkl, jsd::DOUBLE AS jsd, tv::DOUBLE AS tv,
       CASE WHEN tv IS NOT NULL THEN -ln(greatest(1 - tv::DOUBLE, 1e-5)) END AS nla
FROM slots;

-- loss_means: the plain mean of each loss over the scored slots that have it.
-- A loss that was not asked for has count 0 and mean NULL.
CREATE VIEW loss_means_by_sequence AS
SELECT run, drafter, seq_id, unnest(losses, recursive := true)
FROM (
    SELECT run, drafter, seq_id,
           [{'objective': 'ce', 'count': count(ce), 'sum': coalesce(sum(ce), 0)},
            {'objective': 'kl', 'count': count(kl), 'sum': coalesce(sum(kl), 0)},
            {'objective': 'rkl', 'count': count(rkl), 'sum': coalesce(sum(rkl), 0)},
            {'objective': 'jsd', 'count': count(jsd), 'sum': coalesce(sum(jsd), 0)},
            {'objective': 'tv', 'count': count(tv), 'sum': coalesce(sum(tv), 0)},
            {'objective': 'nla', 'count': count(nla), 'sum': coalesce(sum(nla), 0)}] AS losses
    FROM slot_losses
    WHERE scored
    GROUP BY run, drafter, seq_id
);

CREATE VIEW loss_means AS
SELECT run, drafter, objective,
       sum(count)::BIGINT AS count,
       sum(sum) AS sum,
       sum(sum) / nullif(sum(count), 0) AS mean
FROM loss_means_by_sequence
GROUP BY run, drafter, objective;

-- loss_terms: per slot the mask m, the loss l and the weight w of a training
-- loss.
--   m = 1 where the slot is scored and has this loss, else 0
--   plain: w = 1
--   exp:   w = exp(-(k-1) / gamma)
--   dpace: q_k = exp(-ce_k); s_k = (1-alpha) q_k + alpha, 1 where masked;
--          pre_k = product over i <= k of s_i; w_k = m_k sum over j >= k of
--          m_j pre_j. gamma plays no part.
-- A branch whose condition on the arguments is false is not planned at all:
-- only dpace pays for windows.
CREATE MACRO loss_values(objective, weighting) AS TABLE
SELECT run, drafter, seq_id, anchor, slot, ce, l,
       CASE WHEN scored AND l IS NOT NULL AND (weighting != 'dpace' OR ce IS NOT NULL) THEN 1 ELSE 0 END AS m
FROM (
    SELECT run, drafter, seq_id, anchor, slot, scored, ce,
           CASE objective WHEN 'ce' THEN ce WHEN 'kl' THEN kl WHEN 'rkl' THEN rkl
                          WHEN 'jsd' THEN jsd WHEN 'tv' THEN tv WHEN 'nla' THEN nla
                          ELSE error('no objective ' || coalesce(objective::VARCHAR, 'NULL') || ': use ce, kl, rkl, jsd, tv or nla')
           END AS l
    FROM slot_losses
);

CREATE MACRO loss_terms(objective, weighting, gamma, alpha) AS TABLE
SELECT run, drafter, seq_id, anchor, slot, m, l,
       CASE weighting
           WHEN 'plain' THEN 1::DOUBLE
           WHEN 'exp' THEN CASE WHEN gamma > 0 THEN exp(-(slot - 1) / gamma::DOUBLE)
                                ELSE error('gamma must be above 0 for the weighting exp') END
           ELSE error('no weighting ' || coalesce(weighting::VARCHAR, 'NULL') || ': use plain, exp or dpace')
       END AS w
FROM loss_values(objective, weighting)
WHERE weighting IS DISTINCT FROM 'dpace'
UNION ALL
SELECT run, drafter, seq_id, anchor, slot, m, l,
       m * sum(m * pre) OVER (
           PARTITION BY run, drafter, seq_id, anchor ORDER BY slot
           ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING) AS w
FROM (
    SELECT *, product(CASE WHEN m = 1 THEN (1 - alpha::DOUBLE) * exp(-ce) + alpha::DOUBLE ELSE 1 END) OVER (
               PARTITION BY run, drafter, seq_id, anchor ORDER BY slot) AS pre
    FROM loss_values(objective, weighting)
    WHERE weighting = 'dpace'
);

-- loss_by_sequence: the sums behind loss, one row a sequence.
--   weighted = sum l m w,  weight = sum m w,  slots = sum m
-- For dpace the sums are turned round, so that one window does: with w_k =
-- sum over j >= k of m_j pre_j,
--   sum over k of l_k m_k w_k = sum over j of m_j pre_j (sum over k <= j of l_k m_k).
CREATE MACRO loss_by_sequence(objective := 'ce', weighting := 'exp', gamma := 7, alpha := 0.5) AS TABLE
SELECT run, drafter, seq_id,
       sum(m)::BIGINT AS slots,
       coalesce(sum(w) FILTER (m = 1), 0) AS weight,
       coalesce(sum(l * w) FILTER (m = 1), 0) AS weighted
FROM loss_terms(objective, weighting, gamma, alpha)
WHERE weighting IS DISTINCT FROM 'dpace'
GROUP BY run, drafter, seq_id
UNION ALL
SELECT run, drafter, seq_id,
       sum(m)::BIGINT AS slots,
       coalesce(sum(pre * weights) FILTER (m = 1), 0) AS weight,
       coalesce(sum(pre * losses) FILTER (m = 1), 0) AS weighted
FROM (
    SELECT run, drafter, seq_id, m,
           product(CASE WHEN m = 1 THEN (1 - alpha::DOUBLE) * exp(-ce) + alpha::DOUBLE ELSE 1 END) OVER w AS pre,
           sum(m) OVER w AS weights,
           sum(CASE WHEN m = 1 THEN l END) OVER w AS losses
    FROM loss_values(objective, weighting)
    WHERE weighting = 'dpace'
    WINDOW w AS (PARTITION BY run, drafter, seq_id, anchor ORDER BY slot)
)
GROUP BY run, drafter, seq_id;

-- loss(objective, weighting, gamma, normaliser): a training loss over all
-- anchors of the run. One of
--   weight: sum l m w / sum m w
--   count:  sum l m w / (sum m + 1e-5)
--   batch:  sum l m w / sequences, each sequence being one item of the batch
-- NULL when no slot counts.
CREATE MACRO loss(objective := 'ce', weighting := 'exp', gamma := 7, normaliser := 'weight', alpha := 0.5) AS TABLE
SELECT run, drafter, sequences, slots, weight, weighted,
       CASE WHEN slots = 0 THEN NULL
            ELSE weighted / CASE normaliser
                WHEN 'weight' THEN nullif(weight, 0)
                WHEN 'count' THEN slots + 1e-5::DOUBLE
                WHEN 'batch' THEN sequences
                ELSE error('no normaliser ' || coalesce(normaliser::VARCHAR, 'NULL') || ': use weight, count or batch')
            END
       END AS loss
FROM (
    SELECT run, drafter,
           count(*) FILTER (slots > 0) AS sequences,
           sum(slots)::BIGINT AS slots, sum(weight) AS weight, sum(weighted) AS weighted
    FROM loss_by_sequence(objective, weighting, gamma, alpha)
    GROUP BY run, drafter
);

-- losses: the combinations that published recipes train with.
CREATE VIEW losses AS
SELECT 'ce, exp 7, weight' AS recipe, 'ce' AS objective, 'exp' AS weighting, 7::DOUBLE AS gamma, 'weight' AS normaliser, * FROM loss('ce', 'exp', 7, 'weight')
UNION ALL SELECT 'ce, exp 4, weight', 'ce', 'exp', 4, 'weight', * FROM loss('ce', 'exp', 4, 'weight')
UNION ALL SELECT 'ce, plain, weight', 'ce', 'plain', NULL, 'weight', * FROM loss('ce', 'plain', NULL, 'weight')
UNION ALL SELECT 'ce, dpace, count', 'ce', 'dpace', NULL, 'count', * FROM loss('ce', 'dpace', NULL, 'count')
UNION ALL SELECT 'ce, dpace, batch', 'ce', 'dpace', NULL, 'batch', * FROM loss('ce', 'dpace', NULL, 'batch')
UNION ALL SELECT 'kl, exp 4, count', 'kl', 'exp', 4, 'count', * FROM loss('kl', 'exp', 4, 'count');

-- agreement = agreed / positions: the share of positions p whose next token
-- is the target's argmax there, where that next token carries loss mask 1. It
-- is 1 on greedily generated text.
CREATE VIEW agreement_by_sequence AS
SELECT run, seq_id, count(*) AS positions, count(*) FILTER (next_token = target_argmax) AS agreed
FROM (
    SELECT run, seq_id, pos, target_argmax,
           lead(pos) OVER w AS next_pos, lead(token_id) OVER w AS next_token, lead(loss_mask) OVER w AS next_mask
    FROM tokens
    WINDOW w AS (PARTITION BY run, seq_id ORDER BY pos)
)
WHERE next_pos = pos + 1 AND next_mask AND target_argmax IS NOT NULL
GROUP BY run, seq_id;

CREATE VIEW agreement AS
SELECT run, sum(positions)::BIGINT AS positions, sum(agreed)::BIGINT AS agreed,
       sum(agreed) / nullif(sum(positions), 0) AS agreement
FROM agreement_by_sequence
GROUP BY run;

-- repetition flags text that has fallen into a loop, which every drafter
-- guesses. It looks at the last 64 runs of 4 tokens that carry loss mask 1;
-- looped when there are at least 16 and fewer than half are distinct.
CREATE VIEW repetition AS
SELECT run, seq_id, count(*) AS grams, count(DISTINCT gram) AS distinct_grams,
       count(*) >= 16 AND count(DISTINCT gram) < count(*) / 2 AS looped
FROM (
    SELECT run, seq_id,
           [token_id, lead(token_id, 1) OVER w, lead(token_id, 2) OVER w, lead(token_id, 3) OVER w] AS gram,
           lead(pos, 3) OVER w AS last,
           row_number() OVER (PARTITION BY run, seq_id ORDER BY pos DESC) AS from_end
    FROM tokens
    WHERE loss_mask
    WINDOW w AS (PARTITION BY run, seq_id ORDER BY pos)
)
WHERE last IS NOT NULL AND from_end <= 67
GROUP BY run, seq_id;

-- verify_cost: what acceptance costs the target. verified = sum over whole
-- rounds of proposed + 1: the drafts and the root that the target runs a round.
--   verified_per_round = verified / rounds: the width of a verification pass
--   verified_per_token = verified / sum of accept_len: work a token gained; 1
--                        without drafting
CREATE VIEW verify_cost AS
SELECT run, drafter, method, budget,
       count(*) AS rounds,
       sum(proposed + 1)::BIGINT AS verified,
       sum(accept_len)::BIGINT AS tokens,
       sum(proposed + 1) / nullif(count(*), 0) AS verified_per_round,
       sum(proposed + 1) / nullif(sum(accept_len), 0) AS verified_per_token,
       sum(accept_len) / nullif(count(*), 0) AS accept_len_micro
FROM rounds
WHERE NOT truncated
GROUP BY run, drafter, method, budget;

-- accept_len by distance: how far behind the prompt's last token a round's
-- first draft stands. Bucket b holds the distances from b up to 2b.
CREATE VIEW accept_len_by_distance AS
SELECT run, drafter, method, budget,
       (2 ** floor(log2(anchor + 2 - prompt_len)))::BIGINT AS bucket,
       count(DISTINCT seq_id) AS sequences,
       count(*) FILTER (NOT truncated) AS rounds,
       count(*) FILTER (truncated) AS truncated,
       coalesce(sum(accepted) FILTER (NOT truncated), 0)::BIGINT AS sum_accepted,
       avg(accept_len) FILTER (NOT truncated) AS accept_len_micro
FROM rounds JOIN (SELECT run, seq_id, prompt_len FROM sequences) USING (run, seq_id)
WHERE anchor + 2 > prompt_len
GROUP BY run, drafter, method, budget, bucket;

-- accept_len_over_time(parts): the sequences of each drafter in the order in
-- which they were captured, in as many parts of equal size.
CREATE MACRO accept_len_over_time(parts := 24) AS TABLE
SELECT run, drafter, method, budget, part,
       min(created_at) AS since, max(created_at) AS until,
       count(accept_len) AS sequences,
       sum(rounds)::BIGINT AS rounds,
       sum(sum_accepted)::BIGINT AS sum_accepted,
       avg(accept_len) AS accept_len_macro,
       (sum(sum_accepted) + sum(rounds)) / nullif(sum(rounds), 0) AS accept_len_micro
FROM (
    SELECT *, ntile(parts) OVER (PARTITION BY run, drafter, method, budget ORDER BY created_at, seq_id) AS part
    FROM accept_len_by_sequence JOIN (SELECT run, seq_id, created_at FROM sequences) USING (run, seq_id)
)
GROUP BY run, drafter, method, budget, part;

-- fates: what became of every token under the chain, one row a token and
-- drafter.
--   hit       a draft of the round before it was accepted here
--   miss      the draft was refused, and the target's own token took its place
--   bonus     the target's own token after a block of which every draft hit
--   unscored  no round reached it: the first token after the prompt, say
--   masked    it carries loss mask 0
CREATE VIEW fates AS
SELECT run, drafter, seq_id, pos, token_id,
       CASE WHEN NOT loss_mask THEN 'masked' ELSE coalesce(fate, 'unscored') END AS fate, round, k AS slot
FROM (SELECT DISTINCT run, drafter, seq_id FROM rounds WHERE method = 'chain')
JOIN (SELECT run, seq_id, pos, token_id, loss_mask FROM tokens) USING (run, seq_id)
LEFT JOIN (
    SELECT run, drafter, seq_id, round, k, anchor + k AS pos,
           CASE WHEN k <= accepted THEN 'hit' WHEN accepted < proposed THEN 'miss' ELSE 'bonus' END AS fate
    FROM (SELECT *, unnest(range(1, accept_len + 1))::INTEGER AS k FROM rounds WHERE method = 'chain' AND accept_len BETWEEN 1 AND 1024)
) USING (run, drafter, seq_id, pos);

-- misses: which tokens each drafter fails on: of the chain's drafts for a
-- token, how many were refused.
CREATE VIEW misses AS
SELECT run, drafter, token_id,
       count(*) FILTER (fate = 'miss') AS misses,
       count(*) FILTER (fate IN ('hit', 'miss')) AS drafted,
       count(*) FILTER (fate = 'miss') / nullif(count(*) FILTER (fate IN ('hit', 'miss')), 0) AS miss_rate
FROM fates
GROUP BY run, drafter, token_id;

-- similarity_map(parts): the table similarity by state and position, at most
-- so many stretches of positions a pair of runs.
CREATE MACRO similarity_map(parts := 32) AS TABLE
SELECT run_a, run_b, state, pos // width AS part,
       min(pos) AS first_pos, max(pos) AS last_pos, count(*) AS rows,
       avg(cosine) AS mean_cosine, min(cosine) AS min_cosine, avg(rel_l2) AS mean_rel_l2, max(rel_l2) AS max_rel_l2
FROM (
    SELECT *, (max(pos) OVER (PARTITION BY run_a, run_b) // parts + 1)::INTEGER AS width
    FROM similarity
)
GROUP BY run_a, run_b, state, part;

-- leaders: drafters in the order of their accept_len_macro by the chain.
CREATE VIEW leaders AS
SELECT run, rank() OVER (PARTITION BY run ORDER BY accept_len_macro DESC) AS place,
       drafter, accept_len_macro, accept_len_micro, sequences, rounds
FROM accept_len
WHERE method = 'chain' AND accept_len_macro IS NOT NULL;
