// Looks at draftscope's pages in a real browser, as a reader would: a report
// that was written to a file, and the live page of a server while a run comes
// in. Every check is a line on stdout; the exit code is 1 if one failed.
//
//   node pages.mjs report FILE.html SCREENSHOTS
//   node pages.mjs live http://HOST:PORT/ SCREENSHOTS SEQUENCES
import { createRequire } from 'node:module';
import { readFileSync, statSync, mkdirSync } from 'node:fs';
import { pathToFileURL } from 'node:url';
import { join } from 'node:path';

// What is installed lies where the test made it, not beside this file.
const require = createRequire(join(process.env.DRAFTSCOPE_BROWSER_MODULES, 'any.js'));
const { chromium } = require('playwright-core');
const axe = readFileSync(require.resolve('axe-core/axe.min.js'), 'utf8');

const [mode, where, shots, sequences] = process.argv.slice(2);
mkdirSync(shots, { recursive: true });
let failed = 0;
function check(ok, what) {
  console.log((ok ? 'ok    ' : 'FAIL  ') + what);
  if (!ok) failed++;
}

const browser = await chromium.launch({ executablePath: process.env.DRAFTSCOPE_CHROMIUM || '/usr/bin/chromium', args: ['--no-sandbox'] });
console.log('browser ' + browser.version());

// open gives a page in a scheme and width, and what it asked for and complained of.
async function open(url, colorScheme, width) {
  const context = await browser.newContext({ colorScheme, viewport: { width, height: 844 } });
  const page = await context.newPage();
  const seen = { requests: [], complaints: [] };
  page.on('request', r => seen.requests.push(r.url()));
  page.on('console', m => { if (m.type() === 'error' || m.type() === 'warning') seen.complaints.push(m.text()); });
  page.on('pageerror', e => seen.complaints.push(String(e)));
  await page.goto(url);
  return { page, seen, close: () => context.close() };
}

// look checks what holds for every page, in every form.
async function look(page, name) {
  const size = await page.evaluate(() => [document.documentElement.scrollWidth, window.innerWidth]);
  check(size[0] <= size[1], `${name}: nothing is wider than the window (${size[0]} of ${size[1]} px)`);
  const ground = await page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const bright = ground.match(/\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0) / 3;
  check(name.includes('dark') ? bright < 64 : bright > 192, `${name}: the ground is ${ground}`);
  const small = await page.evaluate(() => [...document.querySelectorAll('svg.plot')].filter(s => s.getBoundingClientRect().width > 0).flatMap(s => {
    const scale = s.getBoundingClientRect().width / s.viewBox.baseVal.width;
    return [...s.querySelectorAll('text')].map(t => parseFloat(getComputedStyle(t).fontSize) * scale);
  }).reduce((a, b) => Math.min(a, b), 99));
  check(small >= 9.5, `${name}: the smallest letters of a plot are ${small.toFixed(1)} px`);
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => axe.run(document, { runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa'] }));
  for (const v of violations) console.log(`      ${v.id}: ${v.help}: ${v.nodes.slice(0, 3).map(n => n.html.slice(0, 140)).join(' | ')}`);
  check(violations.length === 0, `${name}: accessible by axe-core, WCAG 2.1 A and AA`);
  await page.screenshot({ path: join(shots, name.replaceAll(/[ ,]+/g, '-') + '.png'), fullPage: true });
}

const forms = [['light', 1200], ['dark', 1200], ['light', 390], ['dark', 390]];

async function report() {
  const url = pathToFileURL(where).href;
  check(statSync(where).size < 1 << 20, `report: the file has ${statSync(where).size} bytes`);
  for (const [scheme, width] of forms) {
    const { page, seen, close } = await open(url, scheme, width);
    const name = `report ${scheme} ${width}`;
    check(seen.requests.length === 1, `${name}: one request, for the file itself (${seen.requests.length})`);
    check(seen.complaints.length === 0, `${name}: the console is silent ${seen.complaints.join('; ')}`);
    const plots = await page.locator('svg.plot').count(), readings = await page.locator('.reading').count();
    check(plots >= 10 && readings >= 3, `${name}: ${plots} plots, ${readings} texts`);
    await look(page, name);
    if (scheme === 'light' && width === 1200) {
      await page.locator('summary').first().click();
      check(await page.locator('details').first().evaluate(d => d.open), `${name}: a folded table opens`);
    }
    await close();
  }
}

async function live() {
  const { page, seen, close } = await open(where, 'light', 1200);
  check(page.url().endsWith('/live'), `live: a browser that asks for / gets ${page.url().replace(/.*\/\/[^/]*/, '')}`);
  await page.waitForFunction(() => document.getElementById('link').textContent === 'live');
  await page.evaluate(() => {
    window.reports = 0;
    new MutationObserver(() => window.reports++).observe(document.getElementById('report'), { childList: true });
  });
  console.log('READY'); // for the test to start the run
  await page.waitForFunction(() => document.querySelector('details'), null, { timeout: 120000 });
  await page.locator('summary').first().click();
  const title = await page.locator('summary').first().textContent();
  await page.evaluate(() => window.scrollTo(0, 300));
  const before = await page.evaluate(() => window.reports);
  console.log('SECOND'); // for the test to start another run
  await page.waitForFunction(n => document.querySelectorAll('.cards').length === 2 &&
    [...document.querySelectorAll('.facts')].filter(f => f.textContent.startsWith(`${n} sequences`)).length === 2, sequences, { timeout: 120000 });
  const told = await page.evaluate(before => ({ n: window.reports - before, now: document.getElementById('now').textContent, y: window.scrollY, open: [...document.querySelectorAll('details[open] summary')].map(s => s.textContent) }), before);
  check(told.n >= 1, `live: the second run appeared without a reload, in ${told.n} new reports`);
  check(/run r\d: \d+ sequences stored|no run is going/.test(told.now), `live: the line above says: ${told.now}`);
  check(told.open.includes(title) && told.y === 300, `live: what was opened stays open, what was scrolled stays there (${told.y} px)`);
  check(seen.requests.every(u => u.startsWith(where)), `live: all ${seen.requests.length} requests are to the server itself`);
  check(seen.complaints.length === 0, `live: the console is silent ${seen.complaints.join('; ')}`);
  await look(page, 'live light 1200');
  await close();
  for (const [scheme, width] of forms.slice(1)) {
    const { page, close } = await open(where, scheme, width);
    await page.waitForSelector('.card', { timeout: 60000 });
    await look(page, `live ${scheme} ${width}`);
    await close();
  }
  // The server goes: the page says so.
  const last = await open(where, 'light', 390);
  await last.page.waitForSelector('.card');
  console.log('STOP'); // for the test to stop the server
  await last.page.waitForFunction(() => document.getElementById('link').textContent.startsWith('connection lost'), null, { timeout: 60000 });
  check(true, 'live: a lost connection is said');
}

try {
  await (mode === 'live' ? live() : report());
} catch (e) {
  check(false, String(e));
}
await browser.close();
console.log(failed ? `${failed} checks failed` : 'all checks passed');
process.exit(failed ? 1 : 0);
