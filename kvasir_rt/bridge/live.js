"use strict";
// What live pages share: the connection with its key, and putting words into elements.
// Text from the server only ever becomes text: nothing here makes HTML from it.
const live = (function () {
  const SILENCE_MS = 10000; // A message comes every second: after so much silence, dial again.
  const RETRY_MS = [500, 1000, 2000, 5000];
  let key = null; // In memory only: a reload asks again.

  const byId = (id) => document.getElementById(id);

  function text(id, words) {
    const node = byId(id);
    if (node.textContent !== words) node.textContent = words;
  }

  function make(name, words, className) {
    const node = document.createElement(name);
    if (words !== undefined) node.textContent = words;
    if (className) node.className = className;
    return node;
  }

  function list(id, sentences) {
    byId(id).replaceChildren(...sentences.map((each) => make("li", each)));
  }

  function number(value) {
    if (value === null || value === undefined) return "-";
    if (Number.isInteger(value)) return value.toLocaleString("en-US");
    return Number(value.toPrecision(4)).toLocaleString("en-US", { maximumFractionDigits: 6 });
  }

  const percent = (value) => (100 * value).toFixed(1) + "%";

  function seconds(value) {
    if (value === null || value === undefined) return "-";
    if (value === 0) return "0 s";
    if (value < 0.001) return number(1e6 * value) + " us";
    if (value < 1) return number(1e3 * value) + " ms";
    return number(value) + " s";
  }

  function bytes(value) {
    const steps = ["B", "KiB", "MiB", "GiB", "TiB"];
    let step = 0;
    while (value >= 1024 && step < steps.length - 1) { value /= 1024; step += 1; }
    return number(value) + " " + steps[step];
  }

  function tiles(id, pairs) {
    const nodes = pairs.map(function (pair) {
      const box = make("div");
      const value = make("dd", pair[1]);
      value.id = pair[2];
      box.append(make("dt", pair[0]), value);
      return box;
    });
    byId(id).replaceChildren(...nodes);
  }

  function rows(id, cells) {
    byId(id).replaceChildren(...cells.map(function (row) {
      const line = make("tr");
      line.append(...row.map((cell) => make("td", cell)));
      return line;
    }));
  }

  function state(words, tone) {
    text("connection", words);
    byId("connection").dataset.tone = tone;
    document.body.classList.toggle("stale", tone !== "good");
  }

  function askForKey() {
    key = null;
    byId("ask").hidden = false;
    state("needs a key", "warn");
  }

  function show(message, onMessage) {
    if (message.error) {
      state(message.error.message, "bad");
      return;
    }
    state("live", "good");
    onMessage(message);
  }

  // Events are `data: JSON` and an empty line; what comes may be cut anywhere.
  async function read(response, onMessage, awake) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      awake();
      rest += value;
      const events = rest.split("\n\n");
      rest = events.pop();
      for (const event of events) {
        if (event.startsWith("data: ")) show(JSON.parse(event.slice(6)), onMessage);
      }
    }
  }

  async function dial(onMessage) {
    const stop = new AbortController();
    let timer = setTimeout(() => stop.abort(), SILENCE_MS);
    const awake = function () {
      clearTimeout(timer);
      timer = setTimeout(() => stop.abort(), SILENCE_MS);
    };
    try {
      const headers = key === null ? {} : { Authorization: "Bearer " + key };
      const response = await fetch("/api/live", { headers, signal: stop.signal, cache: "no-store" });
      if (response.status === 401 || response.status === 403) {
        const refusal = await response.json();
        text("why", refusal.error.message);
        return "refused";
      }
      if (!response.ok) {
        const refusal = await response.json();
        state(refusal.error.message, "warn");
        return "lost";
      }
      awake();
      await read(response, onMessage, awake);
      state("ended; dialling again", "warn");
      return "ended";
    } catch (error) {
      state("no answer; dialling again", "bad");
      return "lost";
    } finally {
      clearTimeout(timer);
    }
  }

  async function start(onMessage) {
    let wake = () => {};
    byId("ask").addEventListener("submit", function (event) {
      event.preventDefault();
      key = byId("key").value.trim();
      byId("key").value = "";
      byId("ask").hidden = true;
      wake();
    });
    let failures = 0;
    for (;;) {
      const how = await dial(function (message) { failures = 0; onMessage(message); });
      if (how === "refused") {
        askForKey();
        await new Promise((resolve) => { wake = resolve; });
        continue;
      }
      const pause = RETRY_MS[Math.min(failures, RETRY_MS.length - 1)];
      failures += 1;
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
  }

  return { start, text, make, list, number, percent, seconds, bytes, tiles, rows, byId };
})();
