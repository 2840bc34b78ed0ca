"use strict";
// Sorting of tables, and the plots. Everything shown is in the page already.
(function () {
  const PRINT_WIDTH = 680; // CSS pixels that fit an A4 page within its margins.
  const NARROW = 600;

  function keyOf(row, column) {
    const text = row.cells[column].dataset.key;
    if (text === undefined) return null;
    const number = Number(text);
    return text === "" || Number.isNaN(number) ? text : number;
  }

  function compare(a, b) {
    if (a === null || b === null) return 0;
    if (typeof a === typeof b) return a < b ? -1 : a > b ? 1 : 0;
    return typeof a === "number" ? -1 : 1;
  }

  function sortBy(head) {
    const table = head.closest("table");
    const column = head.cellIndex;
    const isDescending = head.getAttribute("aria-sort") === "ascending";
    const body = table.tBodies[0];
    const rows = Array.from(body.rows, (row) => [keyOf(row, column), row]);
    rows.sort(function (a, b) {
      if ((a[0] === null) !== (b[0] === null)) return a[0] === null ? 1 : -1; // Always last.
      return isDescending ? compare(b[0], a[0]) : compare(a[0], b[0]);
    });
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", isDescending ? "descending" : "ascending");
    body.append(...rows.map((pair) => pair[1]));
  }

  for (const button of document.querySelectorAll("th button")) {
    button.addEventListener("click", () => sortBy(button.parentNode));
  }

  // A finger that drags over a plot scrolls the page, except along the timeline.
  const isTouched = window.matchMedia("(pointer: coarse)").matches;

  function legendHeight(traces, width) {
    let rows = 1;
    let used = 0;
    for (const trace of traces) {
      const entry = 60 + 7.5 * (trace.name || "").length;
      if (used + entry > width) { rows += 1; used = 0; }
      used += entry;
    }
    return 22 * rows;
  }

  function layoutOf(drawing, box) {
    const given = drawing.layout;
    const isNarrow = box.clientWidth < NARROW;
    const legend = legendHeight(drawing.data, box.clientWidth);
    const layout = Object.assign(
      {
        font: { family: 'system-ui, "DejaVu Sans", sans-serif', size: isNarrow ? 11 : 13, color: "#1b1b1b" },
        margin: { l: 8, r: 12, t: 8, b: 8 },
        paper_bgcolor: "#ffffff",
        plot_bgcolor: "#ffffff",
        showlegend: true,
        legend: { orientation: "h", x: 0, xanchor: "left", y: 1, yanchor: "bottom", traceorder: "normal",
          entrywidth: 0, maxheight: 600 },
        hoverlabel: { align: "left", namelength: -1 },
        height: Number(box.dataset.height) + legend,
        autosize: true,
      },
      given
    );
    if (isTouched) layout.dragmode = given.dragmode ? "pan" : false;
    for (const name of Object.keys(layout)) {
      if (/^[xy]axis/.test(name)) {
        layout[name] = Object.assign(
          { automargin: true, zeroline: false, gridcolor: "#e6e6e6", linecolor: "#999999" },
          layout[name]
        );
      }
    }
    return layout;
  }

  const drawings = JSON.parse(document.getElementById("drawings").textContent);
  const drawn = [];

  function draw(box) {
    const drawing = drawings[box.dataset.drawing];
    // By itself the library offers to upload the plot to its maker: not from this page.
    const config = { responsive: true, displaylogo: false, scrollZoom: false,
      showSendToCloud: false, showEditInChartStudio: false, plotlyServerURL: "",
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"], displayModeBar: isTouched && drawing.layout.dragmode ? true : "hover" };
    drawn.push(box);
    return Plotly.newPlot(box, drawing.data, layoutOf(drawing, box), config);
  }

  const boxes = Array.from(document.querySelectorAll(".plot"));
  Promise.all(boxes.map(draw)).then(
    () => { document.documentElement.dataset.drawn = "yes"; },
    (error) => { document.documentElement.dataset.drawn = "failed"; throw error; }
  );

  window.addEventListener("beforeprint", function () {
    for (const box of drawn) Plotly.relayout(box, { width: PRINT_WIDTH });
  });
  window.addEventListener("afterprint", function () {
    for (const box of drawn) Plotly.relayout(box, { width: null, autosize: true });
  });
})();
