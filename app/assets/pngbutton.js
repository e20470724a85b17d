// Beside "download as SVG" in a chart's bar: the same as PNG, at twice the size, on the page's background.
const loadPlotly = (url) => (window.memboundPlotly ??= new Promise((resolve, reject) => {
  const script = Object.assign(document.createElement("script"), { src: url, onload: () => resolve(window.Plotly), onerror: reject });
  document.head.append(script);
}));

const background = (node) => {
  for (; node; node = node.parentElement) {
    const color = getComputedStyle(node).backgroundColor;
    if (color !== "rgba(0, 0, 0, 0)") return color;
  }
  return "#ffffff";
};

const download = async (chart, url) => {
  const Plotly = await loadPlotly(url);
  // an image has no fonts of the page, and text must be measured in the font that it is drawn in
  const font = { ...chart.layout.font, family: "sans-serif" };
  const legend = { ...chart.layout.legend, font: { ...chart.layout.legend?.font, family: "sans-serif" } };
  const layout = { ...chart.layout, font, legend, paper_bgcolor: background(chart), plot_bgcolor: "rgba(0,0,0,0)" };
  const { width, height } = chart.getBoundingClientRect();
  const filename = chart._context?.toImageButtonOptions?.filename ?? "membound";
  await Plotly.downloadImage({ data: chart.data, layout }, { format: "png", scale: 2, width, height, filename });
};

const addButton = (event) => {
  const chart = event.target.closest?.(".js-plotly-plot");
  const settings = window.memboundPng;
  const svg = chart?.querySelector(".modebar-btn");
  if (!svg || !chart.data || chart.querySelector(".membound-png")) return;
  const button = Object.assign(document.createElement("button"), { type: "button", title: settings.label, textContent: "PNG" });
  button.className = "modebar-btn membound-png";
  button.style.cssText = "border:0;background:none;cursor:pointer;font:600 11px sans-serif;color:inherit;vertical-align:top;padding:4px";
  button.addEventListener("click", () => download(chart, settings.plotlyUrl));
  svg.parentElement.prepend(button);
};

export default function ({ data }) {
  if (!window.memboundPng) document.addEventListener("pointerover", addButton, { passive: true });
  window.memboundPng = data;
}
