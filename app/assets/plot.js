const loadPlotly = (url) => (window.memboundPlotly ??= new Promise((resolve, reject) => {
  const script = Object.assign(document.createElement("script"), { src: url, onload: () => resolve(window.Plotly), onerror: reject });
  document.head.append(script);
}));

// The figure's own template on the page's colours and fonts.
const themed = (node, template) => {
  const style = getComputedStyle(node);
  const value = (name) => style.getPropertyValue(`--st-${name}`).trim();
  const text = value("text-color"), line = value("border-color-light") || value("border-color"), clear = "rgba(0,0,0,0)";
  const own = template?.layout ?? {};
  const axis = (name) => ({ gridcolor: line, zerolinecolor: line, linecolor: line, tickcolor: line, automargin: true, ...own[name] });
  return { ...template, layout: {
    colorway: value("chart-categorical-colors").split(","), paper_bgcolor: clear, plot_bgcolor: clear,
    hoverlabel: { bgcolor: value("secondary-background-color"), bordercolor: line, font: { color: text } },
    modebar: { bgcolor: clear, color: line, activecolor: text }, ...own,
    font: { color: text, family: value("font"), ...own.font }, legend: { bgcolor: clear, ...own.legend },
    xaxis: axis("xaxis"), yaxis: axis("yaxis"),
  } };
};

const background = (node) => {
  for (; node; node = node.parentElement) {
    const color = getComputedStyle(node).backgroundColor;
    if (color !== "rgba(0, 0, 0, 0)") return color;
  }
  return "#ffffff";
};

const download = (Plotly, node, format, key) => {
  // an image has no fonts of the page, and text must be measured in the font that it is drawn in
  const font = { ...node._fullLayout.font, family: "sans-serif" };
  const legend = { ...node.layout.legend, font: { ...node.layout.legend?.font, family: "sans-serif" } };
  const layout = { ...node.layout, font, legend, paper_bgcolor: background(node) };
  const { width, height } = node.getBoundingClientRect();
  const size = { width, height, scale: format === "png" ? 2 : 1 };
  return Plotly.downloadImage({ data: node.data, layout }, { format, ...size, filename: `membound-${key}` });
};

const fill = async (Plotly, node) => {
  const { height } = node.layout;
  node.style.background = background(node);
  await node.requestFullscreen();
  const sized = (whole) => Plotly.relayout(node, { height: whole ? innerHeight : height, width: node.clientWidth });
  node.addEventListener("fullscreenchange", () => { node.style.background = ""; sized(false); }, { once: true });
  sized(true);
};

const CORNERS = { width: 16, height: 16, path: "M1 1h5v2H3v3H1zM10 1h5v5h-2V3h-3zM1 10h2v3h3v2H1zM13 10h2v5h-5v-2h3z" };
// Plotly makes every drawing of its bar as wide as high: a word says itself how wide it is.
const written = (words) => ({
  svg: `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 34 16" style="width: 2.1em"><text x="17" y="13" text-anchor="middle"
    fill="currentColor" font-family="sans-serif" font-weight="600" font-size="14">${words}</text></svg>`,
});

const bar = (Plotly, data) => ({
  displaylogo: false,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "toImage"],
  modeBarButtonsToAdd: [
    { name: "full", title: data.titles.full, icon: CORNERS, click: (node) => fill(Plotly, node) },
    ...["png", "svg"].map((format) => ({
      name: format, title: data.titles[format], icon: written(format.toUpperCase()),
      click: (node) => download(Plotly, node, format, data.key),
    })),
  ],
});

// Names in lines of about so many letters; what is written without spaces is as wide as two of them and may break
// anywhere but before a sign that closes and behind one that opens.
const inLines = (name, most) => {
  const lines = [""];
  let length = 0;
  for (const piece of String(name).match(/<br>|（*(?:[\u2e80-\uffef]|[^\s\u2e80-\uffef<]+\s*|\s+|<)[，。、；：）]*/g) ?? []) {
    if (piece === "<br>") { lines.push(""); length = 0; continue; }
    const wide = [...piece.trimEnd()].reduce((sum, letter) => sum + (/[\u2e80-\uffef]/.test(letter) ? 2 : 1), 0);
    if (length && length + wide > most) { lines.push(""); length = 0; }
    lines[lines.length - 1] += piece;
    length += wide;
  }
  return lines.join("<br>");
};

// On a narrow screen names beside the rows leave room for what they name, those under the columns stand upright, and
// what is written into the chart is smaller.
const NARROW = 520, ROW_NAMES = 120, COLUMN_NAME = 95, NAME_LINE = 11, TITLE_LETTER = 8.5, MORE_ROOM = 1.25;
// A term's English behind its translation, which a narrow screen has no room for.
const short = (name) => String(name).replace(/（[A-Za-z][^（）]{6,}）/g, "");
// As many lines of a name as its row has room for.
const cut = (name, most) => {
  const lines = name.split("<br>");
  return lines.length > most ? [...lines.slice(0, most - 1), `${lines[most - 1].trimEnd()}…`].join("<br>") : name;
};
const fitted = (traces, layout, width) => {
  if (width >= NARROW) return layout;
  const { xaxis, yaxis } = layout;
  const named = traces.find(({ type, y }) => type === "heatmap" && typeof y?.[0] === "string")?.y
    ?? (Array.isArray(yaxis?.categoryarray) ? yaxis.categoryarray : undefined);
  const names = yaxis?.ticktext ?? named;
  const margin = layout.margin ?? layout.template?.layout?.margin;
  const most = names && Math.max(1, Math.floor(((layout.height ?? 450) - (margin?.t ?? 0) - (margin?.b ?? 0)) / names.length / NAME_LINE));
  const rows = names?.some((name) => String(name).length > 16)
    ? { tickvals: yaxis?.tickvals ?? names, ticktext: names.map((name) => cut(inLines(short(name), 19), most)), tickfont: { ...yaxis?.tickfont, size: 10 } }
    : {};
  const across = traces.find(({ type }) => type === "heatmap")?.x;
  const columns = xaxis?.tickangle === 0 && across && (width - ROW_NAMES) / across.length < COLUMN_NAME
    ? { tickangle: -90, tickvals: across, ticktext: across.map((name) => inLines(short(name.replaceAll("<br>", " ")), 16)) } : {};
  const said = xaxis?.title?.text;
  const title = said ? { title: { ...xaxis.title, text: inLines(said, Math.floor((width - ROW_NAMES) / TITLE_LETTER)) } } : {};
  const annotations = layout.annotations?.map((each) => ({ ...each, font: { ...each.font, size: Math.min(each.font?.size ?? 12, 9.5) } }));
  const beside = Object.keys(layout).filter((key) => /^xaxis\d*$/.test(key));
  const few = beside.length < 2 ? {} : Object.fromEntries(beside.map((key) => [key, { ...layout[key], nticks: 3, tickfont: { size: 10 } }]));
  const legend = width < 380 && layout.legend?.font && { ...layout.legend, font: { ...layout.legend.font, size: Math.min(layout.legend.font?.size ?? 12, 9.5) } };
  // words behind the bars, which are as long as on a wide screen
  const behind = traces.some(({ textposition }) => textposition === "outside") && xaxis?.range;
  const room = behind ? { range: [behind[0], MORE_ROOM * behind[1]] } : {};
  return { ...layout, ...few, ...legend && { legend }, ...annotations && { annotations }, yaxis: { ...yaxis, ...rows }, xaxis: { ...xaxis, ...title, ...room, ...few.xaxis, ...columns } };
};

const MOST_WORDS_PX = 10.5;
const smaller = (traces, width) => width >= NARROW ? traces : traces.map((trace) => trace.mode !== "text" ? trace
  : { ...trace, textfont: { ...trace.textfont, size: Math.min(trace.textfont?.size ?? 12, MOST_WORDS_PX) } });

// Words on cells are in the page's colour: what lies under a pale cell is the page.
const onThePage = (node, traces) => {
  const color = getComputedStyle(node).getPropertyValue("--st-text-color").trim();
  return traces.map((trace) => trace.type === "heatmap" && trace.texttemplate && !trace.textfont?.color
    ? { ...trace, textfont: { ...trace.textfont, color } } : trace);
};

// A line through all that a long run told costs more to draw than it shows: every other of the older points goes then.
const MOST_POINTS = 500;
const thinned = (list) => list.length > MOST_POINTS ? list.filter((_, at) => (list.length - 1 - at) % 2 === 0) : list;

// New points join the lines whose series they have. Nothing is drawn of a chart that is off the screen.
const extend = (Plotly, node, points, series) => {
  const { top, bottom } = node.getBoundingClientRect();
  const fresh = points.filter(([seq]) => seq > node.seen);
  if (!fresh.length || bottom < 0 || top > innerHeight) return;
  node.seen = fresh.at(-1)[0];
  const lines = node._fullData.map(({ x, y, meta }) => {
    const value = 2 + series.indexOf(meta), told = fresh.filter((point) => point[value] != null);
    return { x: thinned([...x ?? [], ...told.map(([, at]) => at)]), y: thinned([...y ?? [], ...told.map((point) => point[value])]) };
  });
  return Plotly.restyle(node, { x: lines.map(({ x }) => x), y: lines.map(({ y }) => y) });
};

const draw = async (Plotly, node, data, setStateValue) => {
  const { data: traces, layout: asked, frames } = JSON.parse(data.figure);
  const layout = fitted(traces, asked, node.clientWidth);
  const template = themed(node, layout.template);
  const drawn = data.figure + JSON.stringify(template);
  if (node.drawn === drawn) return;
  node.drawn = drawn;
  const uirevision = data.keepsZoom ? data.key : undefined;
  const titles = JSON.stringify(data.titles);
  if (node.titles !== titles) Object.assign(node, { titles, config: bar(Plotly, data) }); // with another Plotly begins anew
  await Plotly.react(node, { data: smaller(onThePage(node, traces), node.clientWidth), config: node.config,
    layout: { ...layout, template, uirevision, height: data.height } });
  if (data.feed) {
    node.seen = data.feed.seq;
    followed(data.feed, node, (_, { points }) => extend(Plotly, node, points, data.feed.series));
  }
  if (frames) soon(() => node.drawn === drawn && Plotly.addFrames(node, frames));
  node.sizes ??= new ResizeObserver(() => {
    if (node.clientWidth && node.clientWidth !== node._fullLayout?.width) Plotly.Plots.resize(node);
  });
  node.sizes.observe(node);
  if (data.selectable) {
    node.removeAllListeners("plotly_click");
    node.on("plotly_click", ({ points }) =>
      setStateValue("picked", { of: data.name, points: points.map((point) => point.customdata ?? null) }));
  }
};

// Where a slider can put the chart is not needed before somebody can reach for it. Frames take the place of those of
// the same name: Plotly cannot delete more than ten at once.
const soon = window.requestIdleCallback ?? setTimeout;

// A chart is drawn when it is on the screen, or nearly: most of a page is not.
const onceNear = (node, then) => {
  node.nearness?.disconnect();
  node.nearness = new IntersectionObserver((seen) => {
    if (!seen.some(({ isIntersecting }) => isIntersecting)) return;
    node.nearness.disconnect();
    then();
  }, { rootMargin: "150px" });
  node.nearness.observe(node);
};

export default function ({ data, parentElement, setStateValue }) {
  const node = parentElement.querySelector(".membound-chart");
  node.setAttribute("aria-label", data.alt);
  node.style.height = `${data.height}px`;
  const loaded = loadPlotly(data.plotlyUrl);
  onceNear(node, () => loaded.then((Plotly) => draw(Plotly, node, data, setStateValue)).catch(() => { node.textContent = data.alt; }));
  return () => {
    if (node.isConnected) return;
    node.nearness.disconnect();
    node.sizes?.disconnect();
    node.drawn = undefined; // what waits for the page to be idle has nothing to add to any more
    window.Plotly?.purge(node);
  };
}
