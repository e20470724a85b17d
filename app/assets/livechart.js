const loadPlotly = (url) => (window.memboundPlotly ??= new Promise((resolve, reject) => {
  const script = Object.assign(document.createElement("script"), { src: url, onload: () => resolve(window.Plotly), onerror: reject });
  document.head.append(script);
}));

const pageTemplate = (node) => {
  const style = getComputedStyle(node);
  const value = (name) => style.getPropertyValue(`--st-${name}`).trim();
  const axis = { gridcolor: value("border-color"), zerolinecolor: value("border-color"), linecolor: value("border-color"), automargin: true };
  return { layout: {
    font: { color: value("text-color"), family: value("font") }, colorway: value("chart-categorical-colors").split(","),
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", xaxis: axis, yaxis: axis, margin: { l: 48, r: 16, t: 40, b: 40 },
    hoverlabel: { bgcolor: value("secondary-background-color"), font: { color: value("text-color") } }, legend: { bgcolor: "rgba(0,0,0,0)" },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: value("border-color"), activecolor: value("text-color") },
  } };
};

export default function ({ data, parentElement }) {
  const node = parentElement.querySelector(".membound-live-chart");
  const { data: traces, layout } = JSON.parse(data.figure);
  node.setAttribute("aria-label", data.alt);
  node.style.height = `${data.height}px`;
  loadPlotly(data.plotly_url)
    .then((Plotly) => Plotly.react(node, traces, { ...layout, template: pageTemplate(node), uirevision: data.key, height: data.height },
      { responsive: true, displaylogo: false }))
    .catch(() => { node.textContent = data.alt; });
  return () => { if (!node.isConnected) window.Plotly?.purge(node); };
}
