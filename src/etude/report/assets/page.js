"use strict";
// Draws the charts in the page's colours, again when the reader's colour scheme changes, and filters tasks.
(function () {
  const source = document.getElementById("charts");
  const charts = source ? JSON.parse(source.textContent) : [];

  function draw() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const fill = (value) =>
      typeof value === "string" && value.startsWith("--") ? colour(value)
        : Array.isArray(value) ? value.map(fill)
          : value && typeof value === "object" ? Object.fromEntries(Object.entries(value).map(([k, v]) => [k, fill(v)]))
            : value;
    const axis = { gridcolor: colour("--line"), linecolor: colour("--line"), zerolinecolor: colour("--line"), automargin: true };
    for (const place of document.querySelectorAll("[data-chart]")) {
      const chart = fill(charts[Number(place.dataset.chart)]);
      const layout = Object.assign(
        {
          margin: { l: 44, r: 8, t: 8, b: 30 }, showlegend: false, bargap: 0.4,
          paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
          font: { family: style.getPropertyValue("--sans"), size: 12, color: colour("--soft") },
          legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 } },
          hovermode: "x unified",
          hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--ink") } },
        },
        chart.layout,
        { xaxis: Object.assign({}, axis, chart.layout.xaxis), yaxis: Object.assign({}, axis, chart.layout.yaxis) },
      );
      Plotly.react(place, chart.data, layout, { responsive: true, displayModeBar: false });
    }
  }
  if (charts.length) {
    draw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  }

  const buttons = document.querySelectorAll(".filters button");
  for (const button of buttons) {
    button.parentElement.hidden = false;
    button.addEventListener("click", () => {
      const wanted = button.getAttribute("aria-pressed") === "true" ? null : button.dataset.change;
      for (const other of buttons) other.setAttribute("aria-pressed", String(other.dataset.change === wanted));
      for (const task of document.querySelectorAll("details.task")) task.hidden = wanted !== null && task.dataset.change !== wanted;
    });
  }
})();
