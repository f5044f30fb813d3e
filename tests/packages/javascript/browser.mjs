// usage: browser.mjs NODE_MODULES PAGE OUTDIR: prints the answer of the page of samples/javascript in headless Chromium. A GPU is software.
import { createReadStream, existsSync, statSync } from "node:fs";
import { createServer } from "node:http";
import { createRequire } from "node:module";
import { extname, join } from "node:path";

const [modules, page, folder] = process.argv.slice(2);
const { chromium } = createRequire(join(modules, "any.js"))("playwright-core");
const places = { node_modules: modules, OUTDIR: folder };
const types = { ".html": "text/html", ".mjs": "text/javascript", ".js": "text/javascript", ".wasm": "application/wasm" };
const server = createServer((request, response) => {
  const [, first, ...rest] = new URL(request.url, "http://a").pathname.split("/");
  const file = first in places ? join(places[first], ...rest) : page;
  if (!existsSync(file)) return response.writeHead(404).end();
  response.writeHead(200, {
    "Content-Type": types[extname(file)] ?? "application/octet-stream",
    "Content-Length": statSync(file).size,
    "Cross-Origin-Opener-Policy": "same-origin", // threads of WebAssembly need both
    "Cross-Origin-Embedder-Policy": "require-corp",
  });
  createReadStream(file).pipe(response);
});
await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
const gpu = "--enable-unsafe-webgpu --use-webgpu-adapter=swiftshader --enable-features=Vulkan,WebGPU --use-angle=swiftshader --use-vulkan=swiftshader";
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--no-sandbox", ...gpu.split(" ")] });
try {
  const tab = await browser.newPage();
  tab.on("console", (message) => console.error(message.text()));
  const failed = new Promise((_, reject) => tab.on("pageerror", reject));
  await tab.goto(`http://127.0.0.1:${server.address().port}/`);
  await Promise.race([failed, tab.waitForFunction(() => document.title === "answered", null, { timeout: 550_000 })]);
  console.log(await tab.locator("#answer").textContent());
} finally {
  await browser.close();
  server.close();
}
