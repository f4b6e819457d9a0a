// A prompt, and one or two answers to it.
import { ask, Asked, ms, useAsked } from "./parts.js";
import { html, useRef, useState } from "./preact.js";

const GENERATE = "/v1/chat/completions";

export function Playground({ role }) {
  const [models] = useAsked("/v1/models");
  const [model, set] = useState("");
  const [text, setText] = useState("");
  const [answer, setAnswer] = useState(null);
  const running = useRef(null);
  if (role === "viewer") return html`<h2>Playground</h2><p class="quiet">A viewer's key reads; sign in with an operator's.</p>`;
  const send = async (event) => {
    event.preventDefault();
    running.current?.abort();
    const control = running.current = new AbortController();
    setAnswer({ text: "" });
    const began = performance.now();
    let first = null, said = "", usage = null;
    try {
      const body = { model, messages: [{ role: "user", content: text }], stream: true, stream_options: { include_usage: true } };
      const response = await fetch(GENERATE, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal: control.signal });
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
          said += chunk.choices?.[0]?.delta?.content ?? "";
          usage = chunk.usage ?? usage;
          if (said && first === null) first = performance.now() - began;
          setAnswer({ text: said, first, usage });
        }
      }
    } catch (error) {
      if (error.name !== "AbortError") setAnswer({ text: said, error: error.message });
    }
  };
  return html`<h2>Playground</h2><${Asked} state=${models}>${({ data }) => html`<form onSubmit=${send}>
      <div class="row"><label>model <select value=${model || data[0]?.id} onChange=${(event) => set(event.target.value)}>${data.map((one) => html`<option value=${one.id}>${one.id}</option>`)}</select></label></div>
      <label>message <textarea value=${text} onInput=${(event) => setText(event.target.value)} required></textarea></label>
      <div class="row"><button onClick=${() => model || set(data[0]?.id)}>Send</button></div></form>`}<//>
    ${answer ? html`<pre aria-live="polite">${answer.text}</pre>${answer.error ? html`<p class="bad" role="alert">${answer.error}</p>` : null}
      <p class="quiet">first text after ${ms(answer.first)}${answer.usage ? `, ${answer.usage.prompt_tokens} tokens in, ${answer.usage.completion_tokens} out` : ""}</p>` : null}`;
}
