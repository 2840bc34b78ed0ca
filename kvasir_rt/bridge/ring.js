"use strict";
// The bridge's page: the ring now.
(function () {
  const { text, make, list, number, percent, seconds, bytes, tiles, rows, byId } = live;
  const TONES = { idle: "none", starved: "calm", balanced: "good", saturated: "good",
    bottlenecked: "warn", kv_bound: "warn", link_bound: "warn", overloaded: "bad" };
  const SPARK_POINTS = 120;
  const rates = [];

  function verdict(ring) {
    const head = byId("verdict");
    const found = ring.live && ring.live.verdict;
    if (!found) {
      text("verdict", ring.down_why ? "down" : "looking");
      head.dataset.tone = ring.down_why ? "bad" : "none";
      list("evidence", ring.down_why ? [ring.down_why] : []);
      return;
    }
    const where = found.stage === null ? "" : " at stage " + found.stage;
    text("verdict", found.kind.replace("_", " ") + where);
    head.dataset.tone = TONES[found.kind] || "none";
    list("evidence", found.evidence);
    text("span", "About the last " + seconds(ring.live.span_s) + ".");
  }

  function figures(ring) {
    const counts = ring.counts;
    const now = ring.live;
    tiles("tiles", [
      ["output tokens/s", now ? number(now.output_tokens_per_s) : "-", "tokens-per-s"],
      ["running", number(counts.running) + " of " + number(ring.plan.running_max), "running"],
      ["waiting", number(counts.waiting), "waiting"],
      ["open of window", number(ring.open) + " of " + number(ring.window), "window"],
      ["laps/s", now ? number(now.micro_batches_per_s) : "-", "laps-per-s"],
      ["lap p50", seconds(ring.lap_s.p50), "lap-p50"],
      ["lap p95", seconds(ring.lap_s.p95), "lap-p95"],
      ["KV blocks", number(ring.kv.blocks_in_use) + " of " + number(ring.kv.blocks_total), "kv"],
    ]);
    tiles("counts", [
      ["offered", number(counts.offered), "offered"],
      ["finished", number(counts.finished), "finished"],
      ["refused", number(counts.refused), "refused"],
      ["cancelled", number(counts.cancelled), "cancelled"],
      ["failed", number(counts.failed), "failed"],
      ["output tokens", number(ring.output_tokens), "output-tokens"],
      ["micro-batches", number(ring.micro_batches), "micro-batches"],
      ["preemptions", number(ring.kv.preemptions), "preemptions"],
      ["epoch", number(ring.epoch), "epoch"],
      ["up for", seconds(Math.round(ring.elapsed_s)), "elapsed"],
    ]);
  }

  function spark(ring) {
    if (!ring.live) return;
    rates.push(ring.live.output_tokens_per_s);
    if (rates.length > SPARK_POINTS) rates.shift();
    const most = Math.max(...rates, 1e-9);
    const from = SPARK_POINTS - rates.length;
    const points = rates.map((rate, at) => from + at + "," + (98 - (95 * rate) / most).toFixed(2));
    byId("spark").setAttribute("points", points.join(" "));
    text("sparked", "The last two minutes; at most " + number(Math.max(...rates)) + ".");
  }

  function bar(shares) {
    const box = make("div", undefined, "bar");
    for (const name of ["busy", "blocked", "starved"]) {
      const part = make("span", undefined, name);
      part.style.width = 100 * Math.max(0, Math.min(1, shares[name])) + "%";
      part.title = name + " " + percent(shares[name]);
      box.append(part);
    }
    return box;
  }

  function stage(found, now, layers) {
    const card = make("li", undefined, "stage");
    card.dataset.tone = found.state === "wired" ? "good" : "bad";
    const hand = found.holding === null ? "nothing in hand" : "holds micro-batch " + found.holding;
    card.append(
      make("h3", "Stage " + found.index + " · layers [" + found.layers[0] + ", " + found.layers[1] + ") of " + layers),
      make("p", found.state + ", " + hand, "hand")
    );
    const total = found.elapsed_s || 1;
    const shares = now || { busy: found.busy_s / total, blocked: found.blocked_s / total, starved: found.starved_s / total };
    card.append(bar(shares));
    card.append(make("p", ["busy", "blocked", "starved"].map((name) => name + " " + percent(shares[name])).join(", "), "shares"));
    if (now) {
      const causes = Object.entries(now.starved_by).filter((pair) => pair[1] >= 0.001)
        .map((pair) => pair[0].replace("_", " ") + " " + percent(pair[1]));
      card.append(make("p", causes.length ? "starved by " + causes.join(", ") : "never starved"));
    }
    const memory = found.resident_bytes ? ", " + bytes(found.resident_bytes) + " held" : "";
    card.append(
      make("p", number(found.rows) + " rows in " + number(found.micro_batches) + " micro-batches", "work"),
      make("p", (found.device || "none") + " on " + (found.host || "-") + memory),
      make("p", found.restarts ? "replaced " + (found.restarts === 1 ? "once" : found.restarts + " times") : "never replaced")
    );
    return card;
  }

  function limits(ring) {
    const names = Object.keys(ring.binding_limits).filter((name) => ring.binding_limits[name] > 0);
    rows("limits", names.map(function (name) {
      const now = ring.live ? ring.live.binding_limits[name] : undefined;
      return [name.replaceAll("_", " "), now === undefined ? "-" : number(now), number(ring.binding_limits[name])];
    }));
  }

  function mode(found) {
    if (found.is_connected === false) return "no line to workers";
    return found.is_engaged ? "engaged" : "local";
  }

  function swarm(ring) {
    const found = ring.swarm;
    byId("swarm").hidden = !found;
    if (!found) return;
    text("swarm-mode", found.is_engaged
      ? "Engaged: busy enough that workers compute experts too."
      : "Local: the stages compute all experts themselves.");
    tiles("swarm-tiles", [
      ["workers known", number(found.workers_known), "workers-known"],
      ["workers attached", number(found.workers_attached), "workers-attached"],
      ["pairs remote", number(found.pairs.remote), "pairs-remote"],
      ["of all", found.share_remote_pairs === null ? "-" : percent(found.share_remote_pairs), "pairs-share"],
      ["pairs computed here", number(found.pairs.computed), "pairs-computed"],
      ["fallback", number(found.pairs.fallback), "pairs-fallback"],
      ["parts hedged", number(found.hedges), "hedges"],
      ["wrong answers", number(found.mismatches), "mismatches"],
    ]);
    rows("coordinators", found.coordinators.map((each) => [
      String(each.stage), mode(each), number(each.saturation.busy) + " of " + number(each.saturation.slots),
      number(each.pairs.remote), number(each.pairs.computed), number(each.pairs.fallback), number(each.hedges),
    ]));
  }

  live.start(function (ring) {
    document.title = ring.model + " · Kvasir ring";
    text("model", ring.model);
    text("state", ring.state);
    byId("state").dataset.tone = ring.state === "ready" ? "good" : ring.state === "down" ? "bad" : "warn";
    verdict(ring);
    figures(ring);
    spark(ring);
    const layers = ring.plan.layers.length ? ring.plan.layers[ring.plan.layers.length - 1][1] : 0;
    byId("stages").replaceChildren(...ring.stages.map(
      (found, index) => stage(found, ring.live ? ring.live.stages[index] : null, layers)
    ));
    swarm(ring);
    limits(ring);
    document.body.dataset.messages = Number(document.body.dataset.messages || 0) + 1;
    document.body.dataset.elapsed = ring.elapsed_s;
  });
})();
