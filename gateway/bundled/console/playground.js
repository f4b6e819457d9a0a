// A prompt, and the answers of one or two models to it.
import { Asked, ms, useAsked } from "./parts.js";
import { html, useRef, useState } from "./preact.js";

const GENERATE = "/v1/chat/completions";
const TOOL = JSON.stringify([{ type: "function", function: { name: "find", description: "Find a book", parameters: { type: "object", properties: { title: { type: "string" } }, required: ["title"] } } }], null, 2);

// Streams one answer; `show` gets all of it so far with every event.
async function generate(body, signal, show) {
  const began = performance.now();
  let answer = { text: "", reasoning: "", calls: [] };
  const tell = (changes) => { answer = { ...answer, ...changes }; show(answer); };
  tell({});
  try {
    const response = await fetch(GENERATE, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal });
    if (!response.ok) throw new Error((await response.json()).error.message);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let held = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const events = (held + value).split("\n\n");
      held = events.pop();
      for (const one of events) {
        const data = one.startsWith("data: ") ? one.slice(6) : "";
        if (!data || data === "[DONE]") continue;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        const { delta = {}, finish_reason } = chunk.choices?.[0] ?? {};
        const reasoning = delta.reasoning ?? delta.reasoning_content ?? "";  // by server.reasoning_field
        const calls = [...answer.calls];
        for (const call of delta.tool_calls ?? []) {
          const before = calls[call.index] ?? { name: "", given: "" };
          calls[call.index] = { name: before.name + (call.function?.name ?? ""), given: before.given + (call.function?.arguments ?? "") };
        }
        tell({
          text: answer.text + (delta.content ?? ""), reasoning: answer.reasoning + reasoning, calls,
          first: answer.first ?? (delta.content || reasoning || delta.tool_calls ? performance.now() - began : undefined),
          usage: chunk.usage ?? answer.usage, finish: finish_reason ?? answer.finish,
        });
      }
    }
    tell({ total: performance.now() - began });
  } catch (error) {
    if (error.name !== "AbortError") tell({ error: error.message });
  }
}

function Answer({ model, answer }) {
  return html`<section aria-label=${`answer of ${model}`}><h3>${model}</h3>
    ${answer.reasoning ? html`<details><summary>reasoning</summary><pre>${answer.reasoning}</pre></details>` : null}
    <pre aria-live="polite">${answer.text}</pre>
    ${answer.calls.map((one) => html`<pre>${`${one.name}(${one.given})`}</pre>`)}
    ${answer.error ? html`<p class="bad" role="alert">${answer.error}</p>` : null}
    <p class="quiet">first output after ${ms(answer.first)}, complete after ${ms(answer.total)}${answer.finish ? `, ended by ${answer.finish}` : ""}${
      answer.usage ? `, ${answer.usage.prompt_tokens} tokens in, ${answer.usage.completion_tokens} out` : ""}</p></section>`;
}

export function Playground({ role }) {
  const [models] = useAsked("/v1/models");
  const [chosen, choose] = useState(["", ""]);
  const [text, setText] = useState("");
  const [tools, setTools] = useState("");
  const [fault, setFault] = useState("");
  const [answers, setAnswers] = useState([]);
  const running = useRef(null);
  if (role === "viewer") return html`<h2>Playground</h2><p class="quiet">A viewer's key may only read; sign in with an operator's key.</p>`;
  const send = (event, names) => {
    event.preventDefault();
    running.current?.abort();
    let given;
    try { given = tools.trim() ? { tools: JSON.parse(tools) } : {}; } catch (error) { setFault(`tools: ${error.message}`); return; }
    setFault("");
    const { signal } = running.current = new AbortController();
    setAnswers([]);
    names.forEach((model, place) => generate({ model, messages: [{ role: "user", content: text }], stream: true, stream_options: { include_usage: true }, ...given }, signal,
      (answer) => signal.aborted || setAnswers((before) => { const next = [...before]; next[place] = { model, answer }; return next; })));
  };
  return html`<h2>Playground</h2><${Asked} state=${models}>${({ data }) => {
    const names = data.map((one) => one.id);
    const select = (label, place, none) => html`<label>${label} <select value=${chosen[place] || (none ? "" : names[0])} onChange=${(event) => choose(chosen.map((one, index) => index === place ? event.target.value : one))}>
      ${none ? html`<option value="">none</option>` : null}${names.map((one) => html`<option value=${one}>${one}</option>`)}</select></label>`;
    return html`<form onSubmit=${(event) => send(event, [chosen[0] || names[0], chosen[1]].filter(Boolean))}>
      <div class="row">${select("model", 0, false)} ${select("compare with", 1, true)}</div>
      <label>message <textarea name="message" value=${text} onInput=${(event) => setText(event.target.value)} required></textarea></label>
      <details><summary>Tools</summary><label>tools as JSON <textarea name="tools" value=${tools} onInput=${(event) => setTools(event.target.value)}></textarea></label>
        <button type="button" onClick=${() => setTools(TOOL)}>An example</button></details>
      <div class="row"><button>Send</button><button type="button" onClick=${() => running.current?.abort()}>Stop</button></div>
      ${fault ? html`<p class="bad" role="alert">${fault}</p>` : null}</form>`;
  }}<//>
  <div class="pair">${answers.filter(Boolean).map((one) => html`<${Answer} ...${one} />`)}</div>`;
}
