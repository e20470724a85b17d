export default function ({ data, parentElement }) {
  const node = parentElement.querySelector(".membound-written");
  const [request, written] = node.children;
  const show = (text) => {
    const atEnd = node.scrollHeight - node.scrollTop - node.clientHeight < 40;
    request.textContent = text ? data.words.request.replace("%", text.request) : data.words.none;
    written.textContent = text ? `${text.prompt}${text.text}▌` : "";
    if (atEnd) node.scrollTop = node.scrollHeight;
  };
  node.setAttribute("aria-label", data.words.title);
  node.style.height = `${data.height}px`;
  show(data.text);
  followed(data.feed, node, (news) => { if (news.text && news.seq > data.feed.seq) show(news.text); });
}
