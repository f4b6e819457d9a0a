// Vercel's AI SDK: a loop of three turns with tools and an answer of a schema, whole and streamed.
// Arguments: the gateway's address, the key, the model, and the tools' results as JSON. Prints JSON.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, apiKey, name, resultsText] = process.argv.slice(2);
const results = JSON.parse(resultsText);
const baseURL = `${url}/v1`;
const models = {
  openai: createOpenAI({ baseURL, apiKey }).chat(name),
  responses: createOpenAI({ baseURL, apiKey }).responses(name),
  compatible: createOpenAICompatible({
    name: "sluice", baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true,
  })(name),
};
const prompt = "Is Berserk there, and where is order 48213?";
const schema = z.object({ title: z.string(), copies: z.number() });
const inputs = {
  check_stock: z.object({ title: z.string() }),
  order_status: z.object({ order_id: z.string() }),
  ship: z.object({ order_id: z.string(), express: z.boolean() }),
};

function toolsThatNote(called) {
  return Object.fromEntries(
    Object.entries(inputs).map(([toolName, inputSchema]) => [
      toolName,
      tool({
        description: toolName,
        inputSchema,
        execute: async () => {
          called.push(toolName);
          return results[toolName];
        },
      }),
    ]),
  );
}

const found = {};
for (const [kind, model] of Object.entries(models)) {
  for (const streamed of [false, true]) {
    const called = [];
    const asked = { model, prompt, tools: toolsThatNote(called), stopWhen: stepCountIs(5), maxRetries: 0 };
    const answer = streamed ? streamText(asked) : await generateText(asked);
    found[`${kind} ${streamed ? "streamed" : "whole"}`] = {
      text: await answer.text,
      called,
      reason: await answer.finishReason,
      outputTokens: (await answer.totalUsage).outputTokens,
    };
  }
  const { object } = await generateObject({ model, schema, prompt: "How many copies?", maxRetries: 0 });
  found[`${kind} object`] = object;
}
console.log(JSON.stringify(found));
