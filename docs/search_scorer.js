// Ranks the results of the search box: how-to pages first, then the reference, then the pages
// of numbers, changes and design. All other scores are those of Sphinx.
var Scorer = {
  score: ([page, , , , score]) => {
    if (/^(benchmarks|changelog|design)/.test(page)) return score - 30;
    return page.startsWith("reference/") ? score - 2 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
