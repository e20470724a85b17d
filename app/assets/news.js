// Parts of a page that follow the same job share one question to the server. While nobody sees the page none is asked.
// A listener belongs to a node of the page and hears each answer, and the points of all answers so far.
const followed = ({ url, seq, everyMs }, node, listener) => {
  const feeds = (window.memboundFeeds ??= new Map());
  let feed = feeds.get(url);
  if (!feed) {
    feed = { seq, points: [], rows: 0, last: null, listeners: new Map() };
    feeds.set(url, feed);
    const ask = async () => {
      for (const each of [...feed.listeners.keys()]) if (!each.isConnected) feed.listeners.delete(each);
      if (!feed.listeners.size) { feeds.delete(url); return; }
      if (!document.hidden) {
        try {
          const answer = await fetch(`${url}&after=${feed.seq}`, { cache: "no-store" });
          if (answer.ok) {
            const news = feed.last = await answer.json();
            feed.seq = news.seq;
            feed.points.push(...news.points);
            feed.rows = Math.max(feed.rows, news.told_rows);
            for (const each of [...feed.listeners.values()]) each(news, feed);
            if (!news.active) { feeds.delete(url); return; }
          }
        } catch { /* a server that is started again answers the next time */ }
      }
      setTimeout(ask, everyMs);
    };
    setTimeout(ask, everyMs);
  }
  feed.listeners.set(node, listener);
  if (feed.last) listener(feed.last, feed);
};
