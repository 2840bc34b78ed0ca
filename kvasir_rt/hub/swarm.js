"use strict";
// The hub's page: the market and the workers now.
(function () {
  const { text, make, list, number, seconds, bytes, tiles, rows, byId } = live;
  const WORKERS_MAX = 200; // Rows that somebody may look through.
  const EVENTS_MAX = 20;
  const SPANS_MAX = 4000; // Of all demand maps together; more make a phone slow.
  const NAME_LETTERS = 12;
  const STANDINGS = [
    ["proven", "busy", "served, and was checked"],
    ["new", "new", "connected, nothing checked yet"],
    ["doubted", "blocked", "a coordinator found a wrong answer"],
    ["draining", "draining", "on its way out"],
    ["away", "starved", "not on the relay"],
  ];

  const replicas = (count) => count + (count === 1 ? " replica" : " replicas");

  function standing(node) {
    if (!node.is_connected) return "away";
    if (node.is_draining) return "draining";
    if (node.doubted_by.length) return "doubted";
    return node.last_serve_ms ? "proven" : "new";
  }

  function verdict(swarm) {
    const models = swarm.recruitment.models;
    const recruiting = models.filter((model) => model.recruiting);
    const head = byId("verdict");
    const lines = [];
    if (!models.length) {
      text("verdict", "no model is registered");
      head.dataset.tone = "none";
    } else if (recruiting.length) {
      text("verdict", "recruiting for " + recruiting.length + " of " + models.length + " models");
      head.dataset.tone = "warn";
    } else {
      text("verdict", "at rest");
      head.dataset.tone = "good";
    }
    for (const model of recruiting) {
      lines.push(model.model + ": " + model.busy + " of " + model.slots + " slots busy, " +
        replicas(model.effective_target) + " of each expert wanted, " + model.workers + " workers");
    }
    if (swarm.store_problem) {
      lines.push("state is not written: " + swarm.store_problem);
      head.dataset.tone = "bad";
    }
    for (const each of swarm.coordinators) {
      if (each.problem) lines.push("coordinator " + each.coordinator + ": " + each.problem);
    }
    list("evidence", lines);
  }

  function figures(swarm) {
    const counts = swarm.statistics;
    const connected = counts.nodes.filter((node) => node.is_connected).length;
    tiles("tiles", [
      ["workers", number(swarm.workers), "worker-count"],
      ["connected (of those shown)", number(connected), "connected"],
      ["claims open", number(counts.claims_open), "claims"],
      ["claims lapsed", number(counts.claims_lapsed), "lapsed"],
      ["target changes", number(counts.target_changes), "target-changes"],
      ["releases", number(counts.releases), "releases"],
      ["workers lost", number(counts.workers_lost), "lost"],
      ["coordinators", number(swarm.coordinators.length), "coordinators"],
      ["slices on disk", number(swarm.slices.held) + ", " + bytes(swarm.slices.bytes), "slices"],
      ["downloads", number(swarm.slices.downloads) + " now, " + bytes(swarm.slices.bytes_sent), "downloads"],
    ]);
    rows("models", swarm.recruitment.models.map((model) => [
      model.model, model.busy + " of " + model.slots, model.saturated ? "yes" : "no",
      number(model.effective_target), number(model.base_target), number(model.workers),
      seconds(model.age_s), model.reason,
    ]));
  }

  function lack(segment) {
    if (!segment.target) return "none";
    if (segment.replicas >= segment.target) return "lack0";
    if (!segment.scarcity) return "lack1";
    return segment.replicas + segment.claimed > 0 ? "lack2" : "lack3";
  }

  let mapShown = "";
  function maps(swarm) {
    const models = swarm.demand.models;
    const now = JSON.stringify(models);
    if (now === mapShown) return;
    mapShown = now;
    let room = SPANS_MAX;
    let leftOut = 0;
    const nodes = [];
    for (const model of models) {
      const map = make("div", undefined, "map");
      map.dataset.model = model.model;
      for (const layer of model.layers) {
        room -= layer.segments.length;
        if (room < 0) { leftOut += 1; continue; }
        const row = make("div", undefined, "row");
        for (const segment of layer.segments) {
          const [begin, end] = segment.experts;
          const part = make("span", undefined, lack(segment));
          part.style.flexGrow = end - begin;
          part.title = "layer " + layer.layer + ", experts [" + begin + ", " + end + "): " +
            replicas(segment.replicas) + ", " + segment.claimed + " claimed, " + segment.target + " wanted";
          row.append(part);
        }
        map.append(make("span", "layer " + layer.layer), row);
      }
      nodes.push(make("p", model.model + ": " + replicas(model.target) + " of each expert wanted"), map);
    }
    byId("maps").replaceChildren(...nodes);
    text("mapped", leftOut ? leftOut + " layers are left out." : models.length ? "Point at a part for its numbers." : "No model is registered.");
  }

  function workers(swarm) {
    const nodes = swarm.statistics.nodes;
    const counts = new Map(STANDINGS.map((each) => [each[0], 0]));
    for (const node of nodes) counts.set(standing(node), counts.get(standing(node)) + 1);
    byId("standings").replaceChildren(...STANDINGS.filter((each) => counts.get(each[0])).map(function (each) {
      const part = make("span", undefined, each[1] + " standing-" + each[0]);
      part.style.width = (100 * counts.get(each[0])) / nodes.length + "%";
      part.title = each[0] + ": " + each[2];
      return part;
    }));
    text("standing-words", STANDINGS.map((each) => counts.get(each[0]) + " " + each[0]).join(", "));
    rows("workers", nodes.slice(0, WORKERS_MAX).map(function (node) {
      const experts = node.segments.reduce((sum, each) => sum + each[2] - each[1], 0);
      const layers = new Set(node.segments.map((each) => each[0])).size;
      return [node.worker.slice(0, NAME_LETTERS), node.model, standing(node), number(experts), number(layers),
        seconds(node.age_s) + " ago", node.doubted_by.join(", ") || "nobody"];
    }));
    const more = swarm.workers - Math.min(nodes.length, WORKERS_MAX);
    text("left-out", more > 0 ? number(more) + " more workers are not listed." : "");
  }

  function events(swarm) {
    const lately = swarm.events.slice(-EVENTS_MAX).reverse();
    rows("events", lately.map((each) => [
      new Date(1000 * each.at_s).toISOString().slice(0, 19).replace("T", " "), each.kind.replaceAll("_", " "),
      each.model || "-", each.node ? each.node.slice(0, NAME_LETTERS) : "-",
      Object.entries(each.detail).map((pair) => pair[0] + " " + (Array.isArray(pair[1]) ? "[" + pair[1].join(", ") + ")" : pair[1])).join(", "),
    ]));
  }

  live.start(function (swarm) {
    text("hub", swarm.hub.slice(0, NAME_LETTERS));
    byId("hub").dataset.tone = swarm.store_problem ? "bad" : "good";
    verdict(swarm);
    figures(swarm);
    maps(swarm);
    workers(swarm);
    events(swarm);
    document.body.dataset.messages = Number(document.body.dataset.messages || 0) + 1;
  });
})();
