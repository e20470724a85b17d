// What did not change is not written again: the browser draws nothing then.
const say = (node, words) => { if (node.textContent !== words) node.textContent = words; };

export default function ({ data, parentElement, setTriggerValue }) {
  const node = parentElement.querySelector(".membound-job");
  const [bar, words, warning] = node.children;
  const show = (news) => {
    bar.value = news.progress;
    say(words, news.words);
    say(warning, news.warning ? `⚠ ${news.warning}` : "");
    bar.setAttribute("aria-label", news.words);
  };
  show(data);
  let told = data.feed.seq, awaited = data.awaited;
  followed(data.feed, node, (news, feed) => {
    if (news.seq >= data.feed.seq) show(news);
    const begun = awaited && feed.points.length > 0;
    if (news.active && feed.rows <= told && !begun) return;
    told = Math.max(told, feed.rows);
    awaited = awaited && !begun;
    setTriggerValue("changed", news.seq);
  });
}
